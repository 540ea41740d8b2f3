"""The data part of `plugsft check`: sources, tokenizer and the first rows of each source."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..base.console import format_count
from ..base.errors import DataError
from ..data.prepare import describe_unrolled, open_data, open_named_tokens, summarize
from ..data.sample import EstimatedColumns, make_work, sample_rows
from ..data.slices import ShardWriter
from ..data.sources import ROWS_NOT_HELD_OUT, OpenSource, ensure_columns, open_source, share_rows
from ..model.checks import check_weights
from ..model.config import check_ids
from ..recipe.tables import Recipe, Source
from ..registry.active import Active
from .examples import join, like
from .findings import Findings, judge_chats, judge_rows

ROWS = 100
"""Rows of each source that are rendered and encoded."""


def check_data(
    findings: Findings, recipe: Recipe, active: Active, wrong: dict[str, str]
) -> tuple[EstimatedColumns, float]:
    """Check the sources; estimate the examples of an epoch, and the tokens to be written."""
    if recipe.data.tokens:
        return _prepared(findings, recipe, active, wrong), 0.0
    sources = recipe.data.all_sources()
    all_rows = [_open(findings, "data", source) for source in sources if source.source not in wrong]
    opened = [rows for rows in all_rows if rows is not None]
    complete = len(opened) == len(sources)
    model = recipe.model
    can_encode = not {*wrong} & {model.tokenizer or model.path, model.template_file}
    tokens, work = 0.0, None
    # If nothing can be encoded, the number of examples is still known.
    examples = [EstimatedColumns(np.ones(len(rows), np.int64)) for rows in opened]
    with TemporaryDirectory(prefix="plugsft-check-") as folder:
        if complete:
            with findings.about("columns"):
                ensure_columns(recipe.data, opened)
                if can_encode:
                    work = _work(findings, recipe, active, opened, Path(folder))
        for number in range(len(opened)):
            if work is not None:
                with findings.about("rows"):
                    examples[number] = _rows(findings, recipe, active, work, opened, number)
                    tokens += examples[number]["lengths"].sum()
        if recipe.eval is not None and recipe.eval.source not in wrong:
            with findings.about("eval"):
                evaluation = recipe.eval_source()
                rows = _open(findings, "eval", evaluation)
                if rows and any(share_rows(rows.facts, source.facts) for source in opened):
                    findings.warn("eval", ROWS_NOT_HELD_OUT)
                if rows is not None and work:
                    work.sources = [evaluation]
                    with findings.about("rows"):
                        evaluated = _rows(findings, recipe, active, work, [rows], 0)
                        tokens += evaluated["lengths"].sum()
    if not complete:
        return EstimatedColumns(np.ones(0, np.int64)), tokens
    return join(examples, [source.weight for source in sources]), tokens


def _prepared(
    findings: Findings, recipe: Recipe, active: Active, wrong: dict[str, str]
) -> EstimatedColumns:
    """Check the tokens that the recipe names; return an epoch's examples."""
    with findings.about("data"):
        if not wrong:
            tokens = open_named_tokens(recipe, open_data(recipe, active), active)
            check_ids(recipe, tokens.facts["largest_id"])
            findings.ok("data", summarize(tokens.facts, "already prepared"))
            seed = recipe.train.seed
            order = active.hooks.order_examples(tokens=tokens, epoch=0, seed=seed)
            lengths, columns = tokens.lengths[order], tokens.plan_columns()
            ordered = {name: values[order] for name, values in columns.items()}
            return EstimatedColumns(lengths, ordered)
    return EstimatedColumns(np.ones(0, np.int64))


def _open(findings: Findings, subject: str, source: Source) -> OpenSource | None:
    with findings.about(subject):
        rows = open_source(source, f"{subject}.source")
        findings.ok(subject, f"{source.source} ({source.split}): {format_count(len(rows), 'row')}")
        return rows
    return None


def _work(
    findings: Findings, recipe: Recipe, active: Active, rows: list[OpenSource], folder: Path
) -> ShardWriter | None:
    with findings.about("tokenizer"):
        work = make_work(recipe, active, rows, folder, ROWS)
        where = recipe.model.tokenizer or recipe.model.path
        template = "with" if work.tokenizer.chat_template else "without"
        findings.ok(
            "tokenizer",
            f"{where}: {len(work.tokenizer):,} entries, {template} a chat template"
            if where
            else "trained on the data, or read from the cache; with a ChatML template",
        )
        return work
    return None


def _rows(
    findings: Findings,
    recipe: Recipe,
    active: Active,
    work: ShardWriter,
    opened: list[OpenSource],
    number: int,
) -> EstimatedColumns:
    """Prepare the first rows of a source; estimate the examples of all."""
    sample, source = sample_rows(work, opened, number, 0, ROWS), work.sources[number].source
    shard, rows = sample.shard, opened[number].part(0, len(opened[number]))
    problems, warnings = judge_rows(sample, rows, recipe.data)
    first = f"the first {len(sample.rows):,} rows" if len(sample.rows) > 1 else "the first row"
    if not problems:
        several = shard.unrolled
        usable = len({*sample.tokens.rows.tolist()})
        share = "" if usable == len(sample.rows) else f"{usable:,} of "
        turns = f" ({describe_unrolled(several)})" if several else ""
        findings.ok(
            "rows",
            f"{source}: {share}{first} can be used{turns}, {shard.examples:,} examples with "
            f"{shard.tokens / shard.examples:,.0f} tokens each, "
            f"{shard.trained / shard.tokens:.0%} of them trained on",
        )
    warnings += judge_chats(sample, work, opened[number], active)[1]
    for warning in warnings:
        findings.warn("rows", f"{source}: {warning}")
    if shard.unread and not problems:
        findings.ok("rows", f"{source}: unused columns: {', '.join(shard.unread)}")
    check_ids(recipe, shard.largest)
    check_weights(recipe, active, sample.tokens)
    if problems:
        raise DataError("\n".join(f"{source}: {problem}" for problem in problems))
    of_all = len(opened[number]) / len(sample.rows)
    return like(sample.tokens, round(shard.examples * of_all))
