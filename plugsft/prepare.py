"""Sources to tokens on disk, before any process group exists."""

import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from .answers import DataAnswers
from .console import say
from .errors import DataError
from .hooks import Hooks
from .publish import once
from .recipe import Data, Recipe, Source
from .registry import Active, options_of, resolve
from .sources import Rows, open_source
from .tokenizer import load_tokenizer, train_tokenizer
from .tokens import FORMAT, Examples, Tokens, digest, write_index, write_shard
from .types import Encoded, Rendered, Row, Shard, Slice

ROWS_PER_SLICE = 10_000
ROWS_PER_BATCH = 1_000
CURE_BAD = '. Mend them (the first row is 0), or set data.on_bad_row = "drop"'
CURE_LONG = '. Raise data.max_length, or set data.too_long = "truncate" or "drop"'


@dataclass
class Work:
    """What is done to a slice of a source. Travels to other processes as names and options."""

    recipe: Recipe
    sources: list[Source]
    tokenizer_folder: Path
    folder: Path
    _hook: Hooks | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("recipe", "sources", "tokenizer_folder", "folder")
        return {name: vars(self)[name] for name in kept}

    @cached_property
    def hook(self) -> Hooks:
        """The hooks: of this run, or in another process, made again from the recipe."""
        if self._hook is not None:
            return self._hook
        active = resolve(self.recipe.model_dump(exclude_none=True))[1]
        return active.answer(DataAnswers(self.recipe.folder)).hook

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded once in each process."""
        return load_tokenizer(self.recipe.model, self.tokenizer_folder)

    @cached_property
    def rows(self) -> list[Rows]:
        """The sources, opened once in each process."""
        return [open_source(source) for source in self.sources]

    def __call__(self, part: Slice) -> Shard:
        """Render, encode and mask a slice, and write it as one shard."""
        shard = Shard(
            f"data-{part.source:02d}-{part.start:012d}.arrow",
            source=part.source,
            rows=part.stop - part.start,
        )
        batches = [
            self._batch(part.source, start, min(start + ROWS_PER_BATCH, part.stop), shard)
            for start in range(part.start, part.stop, ROWS_PER_BATCH)
        ]
        data, one = self.recipe.data, self.sources[part.source]
        name = one.source if one.split == "train" else f"{one.source} (split {one.split})"
        if shard.bad and data.on_bad_row == "error":
            raise DataError(_complain(shard.bad, name, part.stop) + CURE_BAD)
        longer = {f"longer than {data.max_length} tokens": shard.too_long}
        if shard.too_long and data.too_long == "error":
            raise DataError(_complain(longer, name, part.stop) + CURE_LONG)
        shard.examples = sum(len(batch.rows) for batch in batches)
        shard.tokens = sum(len(batch.ids) for batch in batches)
        shard.trained = write_shard(self.folder / shard.file, batches)
        return shard

    def _batch(self, source: int, start: int, stop: int, shard: Shard) -> Examples:
        read = self.rows[source].read(start, stop)
        numbers = [start + number for number, row in enumerate(read) if row is not None]
        rows: list[Row] = [row for row in read if row is not None]
        for number, row in enumerate(read):
            if row is None:
                shard.bad.setdefault("no JSON object", []).append(start + number)
        rendered = self.render(rows, source, self.tokenizer) if rows else Rendered()
        # The longest says the most: it may end with a note.
        shard.mask = max(shard.mask, rendered.mask, key=len)
        for number, reason in rendered.bad.items():
            shard.bad.setdefault(reason, []).append(numbers[number])
        encoded = self.hook.encode(
            texts=rendered.texts,
            tokenizer=self.tokenizer,
            special_tokens=rendered.special_tokens,
        )
        return _cut(encoded, rendered, numbers, self.recipe.data, shard)

    def render(self, rows: list[Row], source: int, tokenizer: PreTrainedTokenizerBase) -> Rendered:
        """Render rows, or say which columns nobody knows."""
        rendered = self.hook.render(rows=rows, tokenizer=tokenizer, data=self.recipe.data)
        if rendered is None:
            columns = ", ".join(sorted({column for row in rows for column in row})) or "none"
            raise DataError(
                f"{self.sources[source].source}: no format has these columns: {columns}. Known are "
                "messages; prompt and completion; text. Name yours in [data.columns], for "
                'instance messages = "conversation", or add a plugin that renders them'
            )
        return rendered


def prepare(recipe: Recipe, active: Active) -> tuple[Work, Tokens, Tokens | None]:
    """Return the tokens to train on, those to evaluate on, and how they were made."""
    sources = recipe.data.all_sources()
    work = Work(recipe, sources, Path(), Path(), _hook=active.hook)
    work.tokenizer_folder = _tokenizer_folder(recipe, work, active)
    tokens = _tokens(work, active)
    if recipe.eval is None:
        return work, tokens, None
    held_out = Work(recipe, [eval_source(recipe)], work.tokenizer_folder, Path(), _hook=active.hook)
    return work, tokens, _tokens(held_out, active)


def eval_source(recipe: Recipe) -> Source:
    """Return what a recipe evaluates on."""
    assert recipe.eval is not None
    return Source(source=recipe.eval.source or str(recipe.data.source), split=recipe.eval.split)


def _tokenizer_folder(recipe: Recipe, work: Work, active: Active) -> Path:
    """Train the tokenizer of a model from scratch, once; return its folder."""
    scratch = recipe.model.scratch
    if scratch is None or recipe.model.tokenizer:
        return Path()
    key = {
        "data": [rows.identity for rows in work.rows],
        "vocab": scratch.vocab,
        "options": recipe.data.model_dump(include={"columns", "train_on", "template_kwargs"}),
        "plugins": _makers(active, ("render",)),
    }

    def build(folder: Path) -> None:
        started = time.perf_counter()
        tokenizer = train_tokenizer(work.rows, work.render, scratch.vocab)
        tokenizer.save_pretrained(folder)
        took = time.perf_counter() - started
        say(f"tokenizer: trained on the data, {len(tokenizer):,} entries, {took:.1f} s")

    return once(recipe.folder / "scratch" / f"tokenizer-{digest(key)}", build)


def key_of(work: Work, active: Active) -> dict[str, Any]:
    """Return everything that the tokens depend on, and nothing else."""
    tokenizer = work.tokenizer
    backend = tokenizer.backend_tokenizer.to_str()
    return {
        "format": FORMAT,
        "data": [rows.identity for rows in work.rows],
        "options": work.recipe.data.model_dump(exclude={"source", "split", "sources"}),
        "tokenizer": digest({"backend": backend, "names": str(tokenizer.special_tokens_map)}),
        "template": digest({"template": tokenizer.chat_template}),
        "plugins": _makers(active, ("render", "encode", "annotate")),
    }


def _makers(active: Active, hooks: tuple[str, ...]) -> dict[str, Any]:
    return {
        name: {"options": options_of(plugin), "source": active.source_digest(name)}
        for name, plugin in active.plugins.items()
        if active.implements(name, hooks)
    }


def _tokens(work: Work, active: Active) -> Tokens:
    key = key_of(work, active)
    built = []

    def build(folder: Path) -> None:
        built.append(time.perf_counter())
        work.folder = folder
        slices = [
            Slice(number, start, min(start + ROWS_PER_SLICE, len(rows)))
            for number, rows in enumerate(work.rows)
            for start in range(0, len(rows), ROWS_PER_SLICE)
        ]
        shards = active.hook.tokenize(slices=slices, work=work)
        facts = _facts(shards, work, key)
        if not facts["trained_tokens"]:
            raise DataError(
                f"{', '.join(source.source for source in work.sources)}: not one token to train "
                f"on. {_complain(_all_bad(shards), 'the data', facts['rows'])}"
            )
        write_index(folder, [shard.file for shard in shards], facts)

    tokens = Tokens(active.hook.cache(key=key, build=build))
    # Weights and names decide nothing about the tokens, so they may differ from the stored ones.
    for known, source in zip(tokens.facts["sources"], work.sources, strict=True):
        known.update(name=source.source, weight=source.weight)
    took = f"in {time.perf_counter() - built[0]:.1f} s" if built else "from cache"
    say(describe(tokens.facts, took))
    return tokens


def describe(facts: dict[str, Any], took: str) -> str:
    """Say in one line what became of the data."""
    share = facts["trained_tokens"] / facts["tokens"]
    bad = sum(entry["count"] for entry in facts["bad_rows"].values())
    cut = facts["truncated"]["count"]
    return (
        f"data: {facts['examples']:,} examples of {facts['rows']:,} rows, "
        f"{facts['tokens']:,} tokens, {share:.0%} trained on, "
        f"{bad:,} bad rows, {cut:,} truncated, {took}"
    )


def _cut(
    encoded: Encoded, rendered: Rendered, numbers: list[int], data: Data, shard: Shard
) -> Examples:
    """Mask the trained tokens, and treat examples that are too long."""
    mask = _mask(encoded, rendered.spans)
    texts: dict[int, list[slice]] = {}
    start = 0
    for row, count in zip(rendered.rows, encoded.counts.tolist(), strict=True):
        texts.setdefault(row, []).append(slice(start, start + count))
        start += count
    keep, pieces, rows = [], [], []
    for row, whole in texts.items():
        number = numbers[row]
        parts = [slice(t.start, min(t.stop, t.start + data.max_length)) for t in whole]
        cut = parts != whole
        if cut and data.too_long != "truncate":
            shard.too_long.append(number)
            continue
        if not any(mask[part].any() for part in parts):
            within = f" among the first {data.max_length}" if cut else ""
            shard.bad.setdefault("no trained token" + within, []).append(number)
            continue
        if cut:
            shard.truncated.append(number)
        keep += parts
        pieces.append(len(parts))
        rows.append(number)
    return Examples(
        ids=np.concatenate([encoded.ids[:0], *(encoded.ids[part] for part in keep)]),
        mask=np.concatenate([mask[:0], *(mask[part] for part in keep)]),
        counts=np.array([part.stop - part.start for part in keep], np.int64),
        pieces=np.array(pieces, np.int64),
        rows=np.array(rows, np.int64),
    )


def _mask(encoded: Encoded, spans: list[list[tuple[int, int]]]) -> NDArray[np.bool_]:
    """Mark the tokens that spans of characters touch; the first of a text has no predecessor."""
    mask = np.zeros(len(encoded.ids), np.bool_)
    start = 0
    for count, trained in zip(encoded.counts.tolist(), spans, strict=True):
        text = slice(start, start + count)
        mine, ends = mask[text], encoded.ends[text]
        for first, last in trained:
            if last > first:
                a = np.searchsorted(ends, first, "right")
                # Several tokens may share the last character, as bytes of it.
                b = max(np.searchsorted(ends, last) + 1, np.searchsorted(ends, last, "right"))
                mine[a:b] = True
        mine[:1] = False
        start += count
    return mask


def _all_bad(shards: list[Shard]) -> dict[str, list[int]]:
    bad: dict[str, list[int]] = {}
    for shard in shards:
        for reason, rows in shard.bad.items():
            bad.setdefault(reason, []).extend(rows)
    return bad


def _complain(bad: dict[str, list[int]], source: str, rows: int) -> str:
    count = sum(map(len, bad.values()))
    reasons = "; ".join(
        f"{reason}: {len(found)} ({'row' if len(found) == 1 else 'rows'} "
        f"{', '.join(map(str, found[:5]))}{', ...' if len(found) > 5 else ''})"
        for reason, found in sorted(bad.items(), key=lambda item: -len(item[1]))
    )
    return f"{source}: {count:,} bad among the first {rows:,} rows: {reasons}"


def _facts(shards: list[Shard], work: Work, key: dict[str, Any]) -> dict[str, Any]:
    bad = _all_bad(shards)
    if too_long := [row for shard in shards for row in shard.too_long]:
        bad[f"longer than {work.recipe.data.max_length} tokens"] = too_long
    sources = [[s for s in shards if s.source == number] for number in range(len(work.sources))]
    truncated = [row for shard in shards for row in shard.truncated]
    return {
        "key": digest(key),
        "key_parts": key,
        "rows": sum(shard.rows for shard in shards),
        "examples": sum(shard.examples for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "trained_tokens": sum(shard.trained for shard in shards),
        "bad_rows": {
            reason: {"count": len(rows), "rows": rows[:10]} for reason, rows in bad.items()
        },
        "truncated": {"count": len(truncated), "rows": truncated[:10]},
        "mask": max((shard.mask for shard in shards), key=len, default=""),
        "sources": [{"examples": sum(shard.examples for shard in one)} for one in sources],
    }
