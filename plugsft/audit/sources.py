"""The data part of `plugsft check`: sources, tokenizer and the first rows of each source."""

from collections.abc import Container
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..base.console import format_count
from ..base.errors import DataError
from ..data.prepare import open_data, open_named_tokens, summarize
from ..data.sample import EstimatedColumns, make_work
from ..data.slices import ShardWriter
from ..data.sources import ROWS_NOT_HELD_OUT, OpenSource, ensure_columns, open_source, overlap
from ..model.checks import check_weights
from ..model.config import check_ids
from ..recipe.tables import Model, Recipe, Source
from ..registry.active import Active
from .findings import Findings
from .rows import audit

ROWS = 100
"""Rows of each source that are rendered and encoded."""
NAMED = ("unused columns", "chats")
"""Facts of an audit that are shown."""
NOTHING = EstimatedColumns(np.ones(0, np.int64))


def check_data(
    findings: Findings, recipe: Recipe, active: Active, wrong: Container[str]
) -> tuple[EstimatedColumns, float]:
    """Check the sources; estimate the examples of an epoch, and the tokens to be written."""
    model, sources = recipe.model, recipe.data.all_sources()
    needed = {source.source for source in sources} | {recipe.data.tokens, model.template_file}
    needed.add(model.tokenizer or model.path)
    if any(name in wrong for name in needed):
        return NOTHING, 0.0
    if recipe.data.tokens:
        return _prepared(findings, recipe, active), 0.0
    parts, tokens, work = list[EstimatedColumns](), 0.0, None
    with TemporaryDirectory(prefix="plugsft-check-") as folder:
        with findings.about("data"):
            opened = _open(findings, "data", sources)
            ensure_columns(recipe.data, opened)
            with findings.about("tokenizer"):
                work = make_work(recipe, active, opened, Path(folder), ROWS)
                findings.ok("tokenizer", _tokenizer(model, work))
        if work is None:
            return NOTHING, 0.0
        for number, source in enumerate(sources):
            with findings.about("rows"):
                parts.append(_rows(findings, recipe, active, work, opened, number))
                tokens += parts[-1]["lengths"].sum() / source.weight
        if recipe.eval is not None and recipe.eval.source not in wrong:
            with findings.about("eval"):
                work.sources = [recipe.eval_source()]
                rows = _open(findings, "eval", work.sources)
                if any(overlap(rows[0].facts, source.facts) for source in opened):
                    findings.warn("eval", ROWS_NOT_HELD_OUT)
                with findings.about("rows"):
                    tokens += _rows(findings, recipe, active, work, rows, 0)["lengths"].sum()
    if len(parts) < len(sources):
        return NOTHING, tokens
    columns = {
        name: np.concatenate([part[name] for part in parts])
        for name in {name for part in parts for name in part}
    }
    return EstimatedColumns(columns["lengths"], columns), tokens


def _prepared(findings: Findings, recipe: Recipe, active: Active) -> EstimatedColumns:
    """Check the tokens that the recipe names; return an epoch's examples."""
    with findings.about("data"):
        tokens = open_named_tokens(recipe, open_data(recipe, active), active)
        check_ids(recipe, tokens.facts["largest_id"])
        findings.ok("data", summarize(tokens.facts, "already prepared"))
        order = active.hooks.order_examples(tokens=tokens, epoch=0, seed=recipe.train.seed)
        columns = {name: values[order] for name, values in tokens.plan_columns().items()}
        return EstimatedColumns(tokens.lengths[order], columns)
    return NOTHING


def _open(findings: Findings, subject: str, sources: list[Source]) -> list[OpenSource]:
    opened = []
    for source in sources:
        opened.append(open_source(source, f"{subject}.source"))
        rows = format_count(len(opened[-1]), "row")
        findings.ok(subject, f"{source.source} ({source.split}): {rows}")
    return opened


def _tokenizer(model: Model, work: ShardWriter) -> str:
    where = model.tokenizer or model.path
    if where is None:
        return "trained on the data, or read from the cache; with a ChatML template"
    template = "with" if work.tokenizer.chat_template else "without"
    return f"{where}: {len(work.tokenizer):,} entries, {template} a chat template"


def _rows(
    findings: Findings,
    recipe: Recipe,
    active: Active,
    work: ShardWriter,
    opened: list[OpenSource],
    number: int,
) -> EstimatedColumns:
    """Audit the first rows of a source; estimate the examples of all."""
    first = [range(len(opened[number]))[:ROWS]]
    result = audit(work, opened, number, active, recipe.data, first)
    sample, shard = result.sample, result.sample.shard
    for warning in result.warnings:
        findings.warn("rows", f"{result.name}: {warning}")
    check_ids(recipe, shard.largest)
    check_weights(recipe, active, sample.tokens)
    if result.errors:
        raise DataError("\n".join(f"{result.name}: {error}" for error in result.errors))
    findings.ok(
        "rows",
        f"{result.name}: {result.extent}: {shard.examples:,} examples with "
        f"{shard.tokens / shard.examples:,.0f} tokens each, "
        f"{shard.trained / shard.tokens:.0%} of them trained on",
    )
    for label, text in result.facts:
        if label in NAMED:
            findings.ok("rows", f"{result.name}: {label}: {text}")
    # The examples of the sample in their order, and from the start again.
    of_all = work.sources[number].weight * len(opened[number]) / len(sample.rows)
    count, tokens = round(shard.examples * of_all), sample.tokens
    columns = {name: np.resize(of, count) for name, of in tokens.plan_columns().items()}
    return EstimatedColumns(np.resize(tokens.lengths, count), columns)
