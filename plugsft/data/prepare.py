"""Prepare the tokens of a recipe on disk, before any process group exists.

Their cache key has everything that the tokens depend on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.atomic import IsComplete, is_whole
from ..base.build_once import once
from ..base.checksums import digest
from ..base.console import format_count, say
from ..base.errors import DataError, PluginError, PlugsftError, RecipeError, reason_of
from ..base.limits import read_json_object
from ..base.types import Rendered, Row, Rows, Shard
from ..hooks import with_plugins
from ..recipe.parse import changed, flatten
from ..recipe.tables import Data, Recipe, short
from ..registry.active import Active, options_of
from ..registry.contracts import contract_of
from ..tokens.schema import FORMAT, WEIGHT
from ..tokens.shards import write_index
from ..tokens.store import Prepared, Tokens
from ..tokens.tokenizer import OWN, Tokenizer
from .load_tokenizer import Render, data_tokenizer, load_tokenizer, train_tokenizer
from .row_names import counted, cure_bad, describe_bad_rows, describe_warnings
from .slices import ShardWriter, merge, render
from .sources import ROWS_NOT_HELD_OUT, OpenSource, open_source, overlap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOKEN_HOOKS = ("render", "encode")
"""The hooks that affect tokens."""
VERSIONS = {"read": 6, "render": 9, "pairs": 5, "encode": 1, "mask": 3}
"""Stage of preparing -> version of its output.

Raise a stage's version when its output changes: tokens are then prepared again.
tests/test_preparation_versions.py fails if an output has changed and its version has not.
"""

COSTLY = 1.5
"""Chats in several chains are warned of if they have this many times the tokens."""


def plugin_versions(active: Active, hooks: tuple[str, ...]) -> dict[str, Any]:
    """Name what makes a plugin of some hooks give other tokens: its options, and its source.

    The versions of bundled plugins are those of the stages.
    """
    versions = {}
    for name, plugin in active.plugins.items():
        if active.implements(name, hooks):
            declared, options = contract_of(plugin).affects_tokens, options_of(plugin)
            if declared is not None:
                options = {key: value for key, value in options.items() if key in declared}
            source = "" if active.is_bundled(name) else active.source_digest(name)
            versions[name] = {"options": options, "source": source}
    return versions


def key_of(work: ShardWriter, sources: Sequence[OpenSource], active: Active) -> dict[str, Any]:
    """Name everything that the tokens depend on, and nothing else."""
    tokenizer = work.tokenizer
    return {
        "format": FORMAT,
        "data": [source.identity for source in sources],
        "options": work.data.model_dump(exclude={"source", "split", "sources", "tokens"}),
        "tokenizer": digest({"backend": tokenizer.json, "names": tokenizer.special_tokens_map}),
        # The chat template, and how its tokenizer reads it.
        "template": digest(
            {
                "template": tokenizer.chat_template,
                "blocks": tokenizer.honours_blocks,
                "stops": tokenizer.stops,
            }
        ),
        "day": tokenizer.day,
        "stages": VERSIONS,
        "plugins": plugin_versions(active, ("render",)),
        # By the law of `encode` they give the ids of the model's own tokenizer.
        "encoders": plugin_versions(active, ("encode",)),
    }


@dataclass
class OpenData:
    """A recipe's opened sources and tokenizer."""

    work: ShardWriter
    sources: list[OpenSource]
    tokenizer: PreTrainedTokenizerBase
    tokenizer_folder: Path
    """Folder of a tokenizer that was trained on the data."""


WithOthers = Callable[[ShardWriter, Sequence[OpenSource], Path, IsComplete], None] | None
"""Prepares slices of a folder's tokens together with other processes."""


def prepare(
    recipe: Recipe, active: Active, with_others: WithOthers = None, day: str = ""
) -> Prepared:
    """Open the sources, and turn their rows into tokens, or find these.

    `day` is that of templates with a date; default: see `day_of`.
    """
    data = open_data(recipe, active, day)
    if recipe.data.tokens:
        tokens = open_named_tokens(recipe, data, active)
        _announce(tokens, "already prepared")
    else:
        tokens = _prepare_tokens(data.work, data.sources, active, with_others)
    evaluation = None
    if recipe.eval is not None:
        name = recipe.eval_source()
        work = replace(data.work, sources=[name])
        sources = [open_source(name, "eval.source")]
        evaluation = _prepare_tokens(work, sources, active, with_others, "eval")
        if any(overlap(sources[0].facts, source) for source in tokens.facts["sources"]):
            say(f"warning: {ROWS_NOT_HELD_OUT}")
        if missing := sorted(tokens.columns.keys() - evaluation.columns.keys() - {WEIGHT}):
            raise DataError(
                f"eval.source: {name.source}: its rows have no column "
                f"'{missing[0]}', but the training rows have; add it, or name another source"
            )
    return Prepared(data.tokenizer, data.tokenizer_folder, tokens, evaluation)


def open_data(recipe: Recipe, active: Active, day: str = "") -> OpenData:
    """Open a recipe's sources and its tokenizer."""
    names = recipe.data.all_sources()
    # With data.tokens, the rows may lie on another machine.
    readable = not recipe.data.tokens or all(Path(source.source).exists() for source in names)
    sources = [open_source(source) for source in names] if readable else []
    folder = _tokenizer_folder(recipe, sources, active)
    tokenizer = load_tokenizer(recipe.model, folder)
    work = make_writer(recipe, active, recipe.data, tokenizer, Path(), day)
    return OpenData(work, sources, tokenizer, folder)


def make_writer(
    recipe: Recipe,
    active: Active,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    day: str = "",
) -> ShardWriter:
    """Make what turns a recipe's rows into tokens; workers make its plugins again."""
    light = data_tokenizer(tokenizer, recipe.model, day or day_of(recipe.folder))
    plugins = {
        name: options_of(plugin)
        for name, plugin in active.plugins.items()
        if active.implements(name, TOKEN_HOOKS)
    }
    return ShardWriter(data, data.all_sources(), light, folder, plugins, _hooks=active.hooks)


def day_of(run: Path | None) -> str:
    """The day that a template with a date writes: the first day of a run's folder, or today."""
    day: Any = ""
    with suppress(OSError, ValueError, LookupError, TypeError):
        day = run and read_json_object(run / "run.json")["data"]["key_parts"]["day"]
    return str(day or date.today())


def _tokenizer_folder(recipe: Recipe, sources: Sequence[OpenSource], active: Active) -> Path:
    """Train the tokenizer of a model from scratch, once; return its folder."""
    scratch = recipe.model.scratch
    if scratch is None or recipe.model.tokenizer:
        return Path()
    key = {
        "data": [source.identity for source in sources],
        "vocab": scratch.vocab,
        "options": recipe.data.model_dump(
            include={"columns", "ignore", "train_on", "system", "template_kwargs"}
        ),
        "stages": VERSIONS,
        "plugins": plugin_versions(active, ("render",)),
    }

    def fill(folder: Path) -> None:
        started = time.perf_counter()
        trained = train_tokenizer(sources, make_renderer(recipe, active), scratch.vocab)
        trained.save_pretrained(folder)
        seconds = time.perf_counter() - started
        say(f"tokenizer: trained on the data, {len(trained):,} entries, {seconds:.1f} s")

    folder = recipe.folder / "scratch" / f"tokenizer-{digest(key)}"
    if not once(folder, fill=fill):
        say("tokenizer: from cache, trained on the data before")
    return folder


def make_renderer(recipe: Recipe, active: Active) -> Render:
    """Make the function that renders the text to train a tokenizer on."""
    sources = recipe.data.all_sources()

    def render_source(rows: list[Row], number: int, tokenizer: Tokenizer) -> Rendered:
        data, name = recipe.data.of(sources[number]), sources[number].source
        return render(active.hooks, data, name, rows, tokenizer)

    return render_source


def open_named_tokens(recipe: Recipe, data: OpenData, active: Active) -> Tokens:
    """Open the folder of `data.tokens` if it holds the tokens that the recipe would prepare."""
    folder = Path(str(recipe.data.tokens))
    try:
        tokens = Tokens(folder)
        stored_key = dict(tokens.facts["key_parts"])
    except (PlugsftError, OSError, ValueError, KeyError) as error:
        raise RecipeError(
            f"data.tokens: {folder} holds no prepared tokens ({reason_of(error)}); set it to a "
            "folder that `plugsft prepare` printed"
        ) from error
    key = key_of(data.work, data.sources, active)
    # All encoders give the same ids.
    stored_key["encoders"] = key["encoders"]
    # The day of these tokens becomes the run's.
    if key["day"]:
        key["day"] = stored_key.get("day", "")
        data.work.tokenizer.day = key["day"]
    if not data.sources:
        key["data"] = stored_key["data"]
    if parts := changed(flatten(stored_key), flatten(key)):
        raise RecipeError(
            f"data.tokens: {folder} was prepared with another {', '.join(parts)}; undo the change "
            "(its facts.json has the values as key_parts), or prepare again"
        )
    return _name_sources(tokens, data.work)


def _prepare_tokens(
    work: ShardWriter,
    sources: Sequence[OpenSource],
    active: Active,
    with_others: WithOthers,
    table: str = "data",
) -> Tokens:
    """Find the tokens of the sources of a recipe's table, or write them.

    The hook `cache` chooses a folder and calls `build`; there, one of all processes calls `fill`.
    """
    key = key_of(work, sources, active)
    started, built = time.perf_counter(), False

    def fill(folder: Path) -> None:
        nonlocal built
        built = True
        _write_tokens(replace(work, folder=folder), sources, key)

    def build(folder: Path, is_complete: IsComplete = is_whole) -> bool:
        if with_others and not is_complete(folder):
            with_others(work, sources, folder, is_complete)
        return once(folder, is_complete, fill=fill)

    cached = active.hooks.cache(key=key, build=build, read=Tokens)
    if not isinstance(cached, Tokens):
        raise PluginError(
            f"{with_plugins(active.hooks.cache)} gave {short(cached)}; return what read(folder, "
            "in_memory) returned"
        )
    tokens = _name_sources(cached, work)
    origin = f"in {time.perf_counter() - started:.1f} s" if built else "from cache"
    # Lines are counted where the rows are open anyway.
    rows = sources[0].part(0, len(sources[0])) if built and len(sources) == 1 else None
    _announce(tokens, origin, table, rows)
    return tokens


def _write_tokens(work: ShardWriter, sources: Sequence[OpenSource], key: dict[str, Any]) -> None:
    """Write the shards that a killed build has not left, and the index of all."""
    slices = work.slices(sources)
    shards = {part: shard for part in slices if (shard := work.find_finished(part))}
    missing = [part for part in slices if part not in shards]
    if shards and missing:
        say(f"data: continuing after {len(shards):,} of {len(slices):,} slices")
    new_shards = work.hooks.tokenize(slices=missing, work=work)
    if [type(shard) for shard in new_shards] != [Shard] * len(missing):
        raise PluginError(
            f"{with_plugins(work.hooks.tokenize)} gave {short(new_shards)}; it must give a shard "
            f"for each of {len(missing):,} slices, in order"
        )
    shards.update(zip(missing, new_shards, strict=True))
    in_order = [shards[part] for part in slices]
    total = merge(in_order)
    if total.too_long:
        total.bad[f"longer than {work.data.max_length} tokens"] = total.too_long
    if not total.trained:
        names = ", ".join(source.source for source in work.sources)
        # Of one range of a file, the lines can be named.
        rows = sources[0].part(0, len(sources[0])) if len(sources) == 1 else None
        why = describe_bad_rows(total.bad, rows) or describe_warnings(total.warnings, rows)[0]
        cure = cure_bad(total.bad, drop=False)
        raise DataError(f"{names}: no row has a token to train on: {why}{cure}")
    examples = Counter[int]()
    for shard in in_order:
        examples[shard.source] += shard.examples
    facts = {
        "key": digest(key),
        "key_parts": key,
        "rows": total.rows,
        "left_out": total.rows - total.kept_rows,
        "examples": total.examples,
        "tokens": total.tokens,
        "trained_tokens": total.trained,
        "largest_id": total.largest,
        "bad_rows": {reason: counted(rows) for reason, rows in total.bad.items()},
        "truncated": counted(total.truncated),
        "kept_rows": total.kept_rows,
        "longest": total.longest,
        "warnings": total.warnings,
        "unused_columns": total.unread,
        "mask": total.mask,
        "engines": dict(sorted(total.engines.items())),
        "sources": [
            source.facts | {"examples": examples[number]} for number, source in enumerate(sources)
        ],
    }
    write_index(work.folder, in_order, facts)
    for shard in in_order:
        (work.folder / shard.file).with_suffix(".json").unlink()


def _name_sources(tokens: Tokens, work: ShardWriter) -> Tokens:
    """Give tokens the names and weights of this recipe's sources."""
    # The tokens do not depend on them, so the stored values may differ.
    for facts, source in zip(tokens.facts["sources"], work.sources, strict=bool(work.sources)):
        facts.update(name=source.source, weight=source.weight)
    return tokens


def _announce(tokens: Tokens, origin: str, table: str = "data", rows: Rows | None = None) -> None:
    """Say what the data is, and what its author may not mean."""
    say(f"{table}: {summarize(tokens.facts, origin)}")
    if unused := tokens.facts["unused_columns"]:
        say(f"{table}: unused columns: {', '.join(unused)}")
    weights = tokens.columns.get(WEIGHT)
    if weights is not None and (weights != 1).any():
        say(
            f"{table}: examples have weights from {weights.min():g} to {weights.max():g}, "
            f"{weights.mean():g} on average"
        )
    for warning in data_warnings(tokens.facts, rows):
        say(f"warning: {table}: {warning}")


def data_warnings(facts: dict[str, Any], rows: Rows | None = None) -> list[str]:
    """Describe what the author of prepared data may not mean."""
    left_out = {f"{why}; left out": rows for why, rows in facts["bad_rows"].items()}
    return [*describe_warnings(facts["warnings"] | left_out, rows), *warn_of_turns(facts)]


def summarize(facts: dict[str, Any], origin: str) -> str:
    """Summarize prepared data in one line."""
    share = facts["trained_tokens"] / facts["tokens"]
    engines = [name for name, count in facts["engines"].items() if count]
    by = "" if engines in ([], [OWN]) else f" by {' and '.join(engines)}"
    chains = " (chains of turns)" if facts["examples"] > facts["kept_rows"] else ""
    return (
        f"{format_count(facts['examples'], 'example')}{chains} of "
        f"{format_count(facts['rows'], 'row')}, {facts['tokens']:,} tokens{by}, "
        f"{share:.0%} trained on, "
        f"{format_count(facts['left_out'], 'row')} left out, "
        f"{facts['truncated']['count']:,} truncated, {origin}"
    )


def warn_of_turns(counts: Mapping[str, Any]) -> list[str]:
    """Warn if chats in several chains cost much; `counts` are those of a `Shard`."""
    times, chains = counts["tokens"] / counts["longest"], counts["examples"] / counts["kept_rows"]
    if times < COSTLY:
        return []
    return [
        "the chat template writes earlier answers otherwise than the last (Qwen3's drops their "
        f"thoughts, even empty ones). So a chat is {chains:.1f} examples on average: chains of "
        "answers that continue each other, each with the chat before it. That makes "
        f"{times:.1f} times the tokens, so an epoch takes about {times:.1f} times as long, with "
        f'{chains:.1f} times the steps. To train on fewer: data.train_on = "last" (the last answer '
        "of each chat), chats of fewer turns, or a model.chat_template that writes every turn's "
        "thought"
    ]
