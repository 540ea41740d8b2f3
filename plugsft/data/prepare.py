"""Sources to tokens on disk, before any process group exists."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..base.build_once import once
from ..base.checksums import digest
from ..base.console import say
from ..base.errors import DataError, PlugsftError, RecipeError
from ..base.types import Rendered, Row, Shard
from ..recipe.tables import Recipe, Source
from ..registry.active import Active
from ..tokens.shards import write_index
from ..tokens.store import Tokens
from ..tokens.tokenizer import OWN, Tokenizer, lighten
from .cache_key import differences, key_of, makers, with_sources
from .defaults import opened as mapped
from .load_tokenizer import Render, load_tokenizer, train_tokenizer
from .slices import Work, describe_bad_rows, describe_warnings, merge, render
from .sources import Source as Opened
from .sources import ensure_columns, open_source, slices_of


@dataclass
class Job:
    """What is to be prepared, and with which tokenizer."""

    work: Work
    opened: list[Opened]
    tokenizer: PreTrainedTokenizerBase
    tokenizer_folder: Path
    """Of a tokenizer that was trained on the data."""


@dataclass
class Prepared:
    """What a run needs of its data."""

    tokenizer: PreTrainedTokenizerBase
    tokenizer_folder: Path
    tokens: Tokens
    held_out: Tokens | None

    @property
    def largest_id(self) -> int:
        """The largest token id of all data."""
        known = [one.facts["largest_id"] for one in (self.tokens, self.held_out) if one]
        return int(max(known))


def prepare(recipe: Recipe, active: Active) -> Prepared:
    """Return the tokens to train on, those to evaluate on, and the tokenizer."""
    job = job_of(recipe, active)
    if recipe.data.tokens:
        tokens = named(recipe, job, active)
        say(describe(tokens.facts, "prepared before"))
    else:
        tokens = _tokens(job.work, job.opened, active)
    held_out = None
    if recipe.eval is not None:
        job.work.sources = [eval_source(recipe)]
        held_out = _tokens(job.work, [open_source(job.work.sources[0])], active)
    return Prepared(job.tokenizer, job.tokenizer_folder, tokens, held_out)


def job_of(recipe: Recipe, active: Active) -> Job:
    """Open a recipe's sources and its tokenizer."""
    sources = recipe.data.all_sources()
    # The rows of named tokens may lie on the machine that prepared them.
    here = not recipe.data.tokens or all(Path(one.source).exists() for one in sources)
    opened = [open_source(source) for source in sources] if here else []
    folder = _tokenizer_folder(recipe, opened, active)
    tokenizer = load_tokenizer(recipe.model, folder)
    light = lighten(tokenizer)
    work = Work(recipe.data, sources, light, Path(), makers(active), _hook=active.hook)
    return Job(work, opened, tokenizer, folder)


def eval_source(recipe: Recipe) -> Source:
    """Return what a recipe evaluates on."""
    assert recipe.eval is not None
    return Source(source=recipe.eval.source or str(recipe.data.source), split=recipe.eval.split)


def _tokenizer_folder(recipe: Recipe, opened: Sequence[Opened], active: Active) -> Path:
    """Train the tokenizer of a model from scratch, once; return its folder."""
    scratch = recipe.model.scratch
    if scratch is None or recipe.model.tokenizer:
        return Path()
    key = {
        "data": [rows.identity for rows in opened],
        "vocab": scratch.vocab,
        "options": recipe.data.model_dump(
            include={"columns", "ignore", "train_on", "template_kwargs"}
        ),
        "plugins": with_sources(active, ("render",)),
    }

    def build(folder: Path) -> None:
        started = time.perf_counter()
        tokenizer = train_tokenizer(opened, renderer(recipe, active), scratch.vocab)
        tokenizer.save_pretrained(folder)
        took = time.perf_counter() - started
        say(f"tokenizer: trained on the data, {len(tokenizer):,} entries, {took:.1f} s")

    return once(recipe.folder / "scratch" / f"tokenizer-{digest(key)}", build)


def renderer(recipe: Recipe, active: Active) -> Render:
    """Return what turns rows into the text that a tokenizer is trained on."""
    names = [source.source for source in recipe.data.all_sources()]

    def text_of(rows: list[Row], source: int, tokenizer: Tokenizer) -> Rendered:
        return render(active.hook, recipe.data, names[source], rows, tokenizer)

    return text_of


def named(recipe: Recipe, job: Job, active: Active) -> Tokens:
    """Open the tokens that a recipe names, if they are what it would prepare."""
    folder = Path(str(recipe.data.tokens))
    try:
        tokens = mapped(Tokens, folder)
        there = dict(tokens.facts["key_parts"])
    except (PlugsftError, OSError, ValueError, KeyError) as error:
        raise RecipeError(
            f"data.tokens: {folder} holds no prepared tokens ({error}); name a folder that "
            "`plugsft prepare` has given"
        ) from error
    here = key_of(job.work, job.opened, active)
    # Any encoder gives the same ids, and the rows may have stayed where they were prepared.
    there["encoders"] = here["encoders"]
    if not job.opened:
        here["data"] = there["data"]
    if lines := list(differences(there, here)):
        raise RecipeError([f"data.tokens: {folder} was prepared otherwise: {it}" for it in lines])
    return _known(tokens, job.work)


def _tokens(work: Work, opened: Sequence[Opened], active: Active) -> Tokens:
    key = key_of(work, opened, active)
    built = []

    def build(folder: Path) -> None:
        built.append(time.perf_counter())
        if work.sources == work.data.all_sources():
            ensure_columns(work.data, opened)  # what is evaluated on may lack some
        work.folder = folder
        slices = slices_of(opened)
        # A build that was killed left its finished shards.
        done = {one: shard for one in slices if (shard := work.finished(one))}
        left = [one for one in slices if one not in done]
        if done:
            say(f"data: going on after {len(done):,} of {len(slices):,} slices")
        made = active.hook.tokenize(slices=left, work=work)
        done |= dict(zip(left, made, strict=True))
        shards = [done[one] for one in slices]
        facts = _facts(shards, work, key)
        if not facts["trained_tokens"]:
            raise DataError(
                f"{', '.join(source.source for source in work.sources)}: not one token to train "
                f"on. {describe_bad_rows(merge(shards).bad, 'the data')}"
            )
        write_index(folder, shards, facts)
        for shard in shards:
            (folder / shard.file).with_suffix(".json").unlink()

    kept: Any = active.hook.cache(key=key, build=build, read=Tokens)
    tokens = _known(kept, work)
    took = f"in {time.perf_counter() - built[0]:.1f} s" if built else "from cache"
    say(describe(tokens.facts, took))
    for warning in describe_warnings(tokens.facts["warnings"]):
        say(f"warning: data: {warning}")
    return tokens


def _known(tokens: Tokens, work: Work) -> Tokens:
    """Give tokens the names and weights of this recipe."""
    # These decide nothing about the tokens, so they may differ from the stored ones.
    for known, source in zip(tokens.facts["sources"], work.sources, strict=bool(work.sources)):
        known.update(name=source.source, weight=source.weight)
    return tokens


def describe(facts: dict[str, Any], took: str) -> str:
    """Say in one line what became of the data."""
    share = facts["trained_tokens"] / facts["tokens"]
    bad = sum(entry["count"] for entry in facts["bad_rows"].values())
    cut = facts["truncated"]["count"]
    engines = [name for name, count in facts["engines"].items() if count]
    by = "" if engines in ([], [OWN]) else f" by {' and '.join(engines)}"
    return (
        f"data: {facts['examples']:,} examples of {facts['rows']:,} rows, "
        f"{facts['tokens']:,} tokens{by}, {share:.0%} trained on, "
        f"{bad:,} bad rows, {cut:,} truncated, {took}"
    )


def _facts(shards: list[Shard], work: Work, key: dict[str, Any]) -> dict[str, Any]:
    whole = merge(shards)
    too_long = {f"longer than {work.data.max_length} tokens": whole.too_long}
    bad = whole.bad | (too_long if whole.too_long else {})
    return {
        "key": digest(key),
        "key_parts": key,
        "rows": whole.rows,
        "examples": whole.examples,
        "tokens": whole.tokens,
        "trained_tokens": whole.trained,
        "largest_id": whole.largest,
        "bad_rows": {
            reason: {"count": len(rows), "rows": rows[:10]} for reason, rows in bad.items()
        },
        "truncated": {"count": len(whole.truncated), "rows": whole.truncated[:10]},
        "warnings": whole.warnings,
        "mask": whole.mask,
        "engines": dict(sorted(whole.engines.items())),
        "sources": [
            {
                "name": source.source,
                "weight": source.weight,
                "examples": sum(shard.examples for shard in shards if shard.source == number),
            }
            for number, source in enumerate(work.sources)
        ],
    }
