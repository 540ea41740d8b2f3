"""What is done to a slice of a source: rendered, encoded, masked, written. Needs no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.atomic import write_text
from ..base.checksums import add_checksum, file_digest, parse_checksummed
from ..base.errors import DataError
from ..base.types import Counted, Encoded, Ints, Rendered, Row, Shard, Slice, Span
from ..hooks import Hooks
from ..recipe.tables import Data, Source
from ..registry.active import rebuild
from ..tokens.shards import Examples, sums_of, write_shard
from ..tokens.tokenizer import Tokenizer, size_of
from .defaults import DataDefaults
from .jsonl import fault
from .long_texts import shorten
from .render import judge_columns, without

Marks = NDArray[np.bool_]
"""Yes or no for each of some tokens, texts or rows."""

CURE_BAD = '. Mend them (the first row is 0), or set data.on_bad_row = "drop"'
CURE_LONG = '. Raise data.max_length, or set data.too_long = "truncate" or "drop"'


@dataclass
class Work:
    """What is done to a slice. Travels to other processes as options and names of plugins."""

    data: Data
    sources: list[Source]
    tokenizer: Tokenizer
    folder: Path
    plugins: Mapping[str, dict[str, Any]]
    """Those that render or encode, with their options."""
    _hook: Hooks | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("data", "sources", "tokenizer", "folder", "plugins")
        return {"_hook": None} | {name: vars(self)[name] for name in kept}

    @cached_property
    def hook(self) -> Hooks:
        """The hooks: of this run, or in another process, made again from the options."""
        return self._hook or rebuild(self.plugins).attach(DataDefaults(self.folder)).hook

    def __call__(self, part: Slice) -> Shard:
        """Render, encode and mask a slice, and write it as one shard."""
        shard = Shard(
            f"data-{part.source:02d}-{part.start:012d}.arrow",
            source=part.source,
            rows=part.stop - part.start,
        )
        examples = self._examples(part, shard)
        if shard.bad and self.data.on_bad_row == "error":
            raise DataError(print_error(shard.bad, self.where(part)) + CURE_BAD)
        longer = {f"longer than {self.data.max_length} tokens": shard.too_long}
        if shard.too_long and self.data.too_long == "error":
            raise DataError(print_error(longer, self.where(part)) + CURE_LONG)
        shard.examples, shard.tokens = len(examples.rows), len(examples.ids)
        shard.largest = int(examples.ids.max(initial=0))
        path = self.folder / shard.file
        shard.trained = write_shard(path, examples)
        shard.stamp = [path.stat().st_size, file_digest(path)]
        # Written last: a shard that has it is whole, and need not be made again after a kill.
        write_text(path.with_suffix(".json"), json.dumps(add_checksum(asdict(shard))))
        return shard

    def where(self, part: Slice) -> str:
        """Name a slice: its source and rows."""
        one = self.sources[part.source]
        split = "" if one.split == "train" else f" (split {one.split})"
        return f"{one.source}{split}, rows {part.start:,} to {part.stop - 1:,}"

    def finished(self, part: Slice) -> Shard | None:
        """Return the shard of a slice that a killed build left behind, if it is whole."""
        path = self.folder / f"data-{part.source:02d}-{part.start:012d}.arrow"
        try:
            shard = Shard(**parse_checksummed(path.with_suffix(".json").read_text()))
            whole = shard.stamp == [path.stat().st_size, file_digest(path)]
        except (OSError, ValueError, TypeError):
            return None
        return shard if whole and shard.rows == part.stop - part.start else None

    def _examples(self, part: Slice, shard: Shard) -> Examples:
        read = part.rows.read(0, part.stop - part.start)
        numbers = [part.start + number for number, row in enumerate(read) if row is not None]
        rows: list[Row] = [row for row in read if row is not None]
        for number, row in enumerate(read):
            if row is None:
                shard.bad.setdefault(fault(part.rows, number), []).append(part.start + number)
        source = self.sources[part.source].source
        rendered = render(self.hook, self.data, source, rows, self.tokenizer)
        shard.mask = rendered.mask
        for number, reason in rendered.bad.items():
            shard.bad.setdefault(reason, []).append(numbers[number])
        for warning, places in rendered.warnings.items():
            found = sorted({numbers[place] for place in places if place not in rendered.bad})
            shard.warnings |= {warning: _first_of(found)} if found else {}
        shard.unread = rendered.unread
        rendered, encoded = self._encode(rendered)
        shard.engines = encoded.engines
        return _cut(encoded, rendered, np.array(numbers, np.int64), self.data, shard)

    def _encode(self, rendered: Rendered) -> tuple[Rendered, Encoded]:
        """Encode texts; only a beginning of those far longer than data.max_length."""
        short = shorten(rendered, self.tokenizer, self.data.max_length)
        encoded = self._ids(short)
        pairs = zip(short.texts, rendered.texts, encoded.counts.tolist(), strict=True)
        # A plugin may make fewer tokens than the model's own tokenizer.
        if any(text is not whole and n <= self.data.max_length for text, whole, n in pairs):
            return rendered, self._ids(rendered)
        return short, encoded

    def _ids(self, rendered: Rendered) -> Encoded:
        return self.hook.encode(
            texts=rendered.texts,
            tokenizer=self.tokenizer,
            special_tokens=rendered.special_tokens,
        )


def render(hook: Hooks, data: Data, source: str, rows: list[Row], tokenizer: Tokenizer) -> Rendered:
    """Render rows, or say which columns nobody knows."""
    if not rows:
        return Rendered()
    if data.ignore:
        rows = [without(row, data.ignore) for row in rows]
    rendered = hook.render(rows=rows, tokenizer=tokenizer, data=data)
    if rendered is None:
        columns = ", ".join(sorted({column for row in rows for column in row})) or "none"
        named = "".join(f', {ours} = "{yours}"' for ours, yours in data.columns.items())
        columns += named and f" (with [data.columns] {named[2:]})"
        if any("input_ids" in row for row in rows):
            columns += ". Rows of tokens (input_ids) cannot be trained on yet"
        raise DataError(
            f"{source}: no format has these columns: {columns}. Known are messages; "
            "prompt and completion; instruction and output; conversations; text. Name yours in "
            '[data.columns], for instance messages = "dialogue", or add a plugin that renders them'
        )
    judge_columns(rows, rendered, data)
    return rendered


def print_error(bad: dict[str, list[int]], where: str) -> str:
    """Say which rows are bad and why, the most frequent reason first."""
    count = sum(map(len, bad.values()))
    found = sorted(bad.items(), key=lambda item: -len(item[1]))
    reasons = "; ".join(f"{reason}: {listed(rows)}" for reason, rows in found)
    return f"{where}: {count:,} bad: {reasons}"


def listed(rows: list[int], count: int | None = None) -> str:
    """Name some rows, which may be the first of more: "3 (rows 1, 5, 7)"."""
    count = len(rows) if count is None else count
    shown = ", ".join(map(str, rows[:5])) + (", ..." if count > 5 else "")
    return f"{count:,} ({'row' if count == 1 else 'rows'} {shown})"


def _first_of(rows: list[int]) -> Counted:
    return {"count": len(rows), "rows": rows[:10]}


def warnings_of(warnings: Mapping[str, Counted]) -> list[str]:
    """Say how many rows each warning is about, and which."""
    return [f"{listed(it['rows'], it['count'])}: {one}" for one, it in sorted(warnings.items())]


def joined(shards: Sequence[Shard]) -> Shard:
    """Return several shards' facts as one's."""
    whole = Shard("")
    for shard in shards:
        whole.rows += shard.rows
        whole.examples += shard.examples
        whole.tokens += shard.tokens
        whole.trained += shard.trained
        whole.largest = max(whole.largest, shard.largest)
        whole.too_long += shard.too_long
        whole.truncated += shard.truncated
        for reason, rows in shard.bad.items():
            whole.bad.setdefault(reason, []).extend(rows)
        for warning, some in shard.warnings.items():
            there = whole.warnings.get(warning, {"count": 0, "rows": []})
            rows = (there["rows"] + some["rows"])[:10]
            whole.warnings[warning] = {"count": there["count"] + some["count"], "rows": rows}
        whole.unread = sorted({*whole.unread, *shard.unread})
        for name, count in shard.engines.items():
            whole.engines[name] = whole.engines.get(name, 0) + count
    whole.mask = "; ".join(sorted({shard.mask for shard in shards if shard.examples}))
    return whole


def _cut(encoded: Encoded, rendered: Rendered, numbers: Ints, data: Data, shard: Shard) -> Examples:
    """Mask the trained tokens, and treat examples that are too long.

    A row may have several texts, which follow each other; what becomes of one becomes of all.
    """
    mask = mask_of(encoded, rendered.texts, rendered.spans)
    begin_alike(encoded, rendered, mask)
    rows, pieces = np.unique(np.array(rendered.rows, np.int64), return_counts=True)
    first = np.concatenate([[0], np.cumsum(pieces)])[:-1].astype(np.int64)
    counts = np.minimum(encoded.counts, data.max_length)
    kept = _starts_with(counts, encoded.counts)
    cut = _any(counts < encoded.counts, first)
    # Of two answers to compare, both must be there.
    trained = ~_any(sums_of(mask & kept, encoded.counts) == 0, first)
    good = trained if data.too_long == "truncate" else trained & ~cut
    if cut.any() or not trained.all():
        _report(shard, numbers[rows], cut, trained, data)
    texts = np.repeat(good, pieces)
    keep = kept & np.repeat(texts, encoded.counts)
    whole = bool(keep.all())  # nearly always, and then nothing need be copied
    return Examples(
        ids=encoded.ids if whole else encoded.ids[keep],
        mask=mask if whole else mask[keep],
        counts=counts[texts],
        pieces=pieces[good].astype(np.int64),
        rows=numbers[rows][good],
    )


def _report(shard: Shard, rows: Ints, cut: Marks, trained: Marks, data: Data) -> None:
    """Note the rows that were cut, left out, or have nothing to train on."""
    leave = data.too_long != "truncate"
    shard.too_long += rows[cut].tolist() if leave else []
    shard.truncated += [] if leave else rows[cut & trained].tolist()
    beyond = f" among the first {data.max_length} (raise data.max_length)"
    for found, note in ((~trained & ~cut, ""), (~trained & cut & (not leave), beyond)):
        if found.any():
            shard.bad.setdefault(f"no trained token{note}", []).extend(rows[found].tolist())


def mask_of(encoded: Encoded, texts: list[str], spans: list[list[Span]]) -> Marks:
    """Mark the tokens that spans of characters touch; the first of a text has no predecessor."""
    starts, stops, owners, at = [], [], [], 0
    for number, (text, row) in enumerate(zip(texts, spans, strict=True)):
        done = 0
        for a, b in row if len(row) == 1 else sorted(row):
            a = max(a, done)
            if b > a:
                at += size_of(text, done, a)
                starts.append(at)
                at += size_of(text, a, b)
                stops.append(at)
                owners.append(number)
                done = b
        at += size_of(text, done, len(text))
    ends, limits = encoded.ends, np.cumsum(encoded.counts)
    first = np.searchsorted(ends, np.array(starts, np.int64), "right")
    # Several tokens may share the last character, as bytes of it; and an end-of-text token that
    # the tokenizer adds has no character of its own.
    until = np.array(stops, np.int64)
    last = np.maximum(
        np.searchsorted(ends, until, "left") + 1, np.searchsorted(ends, until, "right")
    )
    last = np.minimum(last, limits[np.array(owners, np.int64)])
    # A token that two spans touch belongs to the first of them.
    first = np.maximum(first, np.append(0, np.maximum.accumulate(last))[:-1])
    edges = np.stack([first, np.maximum(first, last)], 1).ravel()
    runs = np.diff(edges, prepend=0, append=len(ends))
    mask = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    mask[(limits - encoded.counts)[encoded.counts > 0]] = False
    return mask


def begin_alike(encoded: Encoded, rendered: Rendered, mask: Marks) -> None:
    """Train both answers to a prompt from the same token on: the first in which they may differ.

    Only then are their log-probabilities given the same tokens. A tokenizer may join the end of a
    prompt with one answer and not with the other, and a chat template may ask for an answer
    without reasoning where one of the two has some.
    """
    ids, rows, stops = encoded.ids, rendered.rows, np.cumsum(encoded.counts)
    for second in range(1, len(rows)):
        if rows[second] != rows[second - 1]:
            continue
        pair = slice(second - 1, second + 1)
        texts, spans = rendered.texts[pair], rendered.spans[pair]
        begin = min((start for one in spans for start, _ in one), default=0)
        if texts[0][:begin] != texts[1][:begin]:
            continue  # they differ before the assistant's words
        middle, stop = stops[pair].tolist()
        first = middle - int(encoded.counts[second - 1])
        most = min(middle - first, stop - middle)
        a, b = slice(first, first + most), slice(middle, middle + most)
        differs = (ids[a] != ids[b]) | mask[a] | mask[b]
        if not (differs.any() and mask[first:middle].any() and mask[middle:stop].any()):
            continue  # one of them trains nothing, and the pair is left out
        place = max(1, int(differs.argmax()))
        mask[first + place : first + int(mask[first:middle].argmax())] = True
        mask[middle + place : middle + int(mask[middle:stop].argmax())] = True


def _starts_with(kept: Ints, counts: Ints) -> Marks:
    """Mark the first `kept` of each text's tokens."""
    if np.array_equal(kept, counts):
        return np.ones(int(counts.sum()), np.bool_)
    place = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return place < np.repeat(kept, counts)


def _any(values: Marks, first: Ints) -> Marks:
    """Tell of each row whether any of its texts is true."""
    if not len(first):
        return np.zeros(0, np.bool_)
    return np.logical_or.reduceat(values, first)
