"""Measure a sample of a source, and find rows that would make training wrong."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..base.console import format_count
from ..base.errors import DataError
from ..base.types import Ints, Rows
from ..data.chat import Chat
from ..data.formats import BadRow
from ..data.prepare import describe_unrolled
from ..data.row_names import name_rows
from ..data.sample import Sample, sample_ranges
from ..data.slices import ShardWriter
from ..data.sources import OpenSource
from ..data.turns import ASK
from ..recipe.tables import Data
from ..registry.active import Active
from ..tokens.store import Tokens
from .findings import judge_chats, judge_rows

SAMPLE, RANGES = 1_000, 20
"""Rows of a sample, and the ranges that they come from."""
CHUNK = 1_000
"""Rows that are read at a time."""
QUANTILES = {"median": 50, "95th percentile": 95, "99th percentile": 99, "longest": 100}
BINS = 12
UNLIMITED = 2**31 - 1

Example = tuple[int, NDArray[np.int32], NDArray[np.bool_]]
"""A row's number, its tokens, and which of them are trained."""


@dataclass
class Audit:
    """A sample of a source, measured and judged."""

    name: str
    rows: Rows
    """All rows of the source."""
    max_length: int
    sample: Sample
    lengths: Ints
    """Tokens of every example, before long ones are cut or dropped."""
    facts: list[tuple[str, str]] = field(default_factory=list)
    """Labels and texts; a label may be repeated."""
    errors: list[str] = field(default_factory=list)
    """Problems that would make training wrong."""
    warnings: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The facts, then the findings."""
        warnings = [("warning", text) for text in self.warnings]
        return [*self.facts, *warnings, *(("error", text) for text in self.errors)]

    @property
    def total(self) -> int:
        """Rows of the source."""
        return len(self.rows)

    def name_rows(self, numbers: Sequence[int]) -> str:
        """Name rows of the source."""
        return name_rows(numbers, self.rows)

    @property
    def extent(self) -> str:
        """The extent of the sample, in words."""
        rows = len(self.sample.rows)
        if rows == self.total:
            return f"all {rows:,} rows" if rows > 1 else "its only row"
        ranges = format_count(len(self.sample.ranges), "range")
        return f"{rows:,} of {self.total:,} rows, in {ranges}"


def audit(
    work: ShardWriter,
    opened: list[OpenSource],
    source: int,
    active: Active,
    data: Data,
    ranges: list[range],
) -> Audit:
    """Audit rows of a source; `data` tells which problems stop a run."""
    sample = sample_ranges(work, opened, source, ranges)
    lengths = _whole_lengths(work, opened, source, sample)
    rows = opened[source].part(0, len(opened[source]))
    result = Audit(work.sources[source].source, rows, work.data.max_length, sample, lengths)
    if sample.shard.examples:
        _measure(result)
        _judge_tokens(result, work)
    if sample.shard.unread:
        result.facts += [("unused columns", ", ".join(sample.shard.unread))]
    if sample.shard.unrolled:
        result.facts += [("chats", describe_unrolled(sample.shard.unrolled))]
    warnings = judge_chats(sample, work, opened[source], active)
    over = int((lengths - data.max_length).clip(0).sum())
    errors, more = judge_rows(sample, rows, data, over)
    result.errors += errors
    result.warnings += [*warnings, *more]
    return result


def choose_ranges(total: int, everything: bool) -> list[range]:
    """Ranges from all over a source, which is often sorted; or all of it."""
    if everything or total <= SAMPLE:
        return [range(total)[start : start + CHUNK] for start in range(0, total, CHUNK)]
    size = SAMPLE // RANGES
    starts = np.linspace(0, total - size, RANGES).astype(np.int64).tolist()
    return [range(start, start + size) for start in starts]


def quantiles(lengths: Ints) -> dict[str, int]:
    """Lengths that occur, by names: to choose data.max_length."""
    values = np.percentile(lengths, [*QUANTILES.values()], method="inverted_cdf")
    return dict(zip(QUANTILES, values.astype(np.int64).tolist(), strict=True))


def histogram(lengths: Ints) -> list[tuple[int, int, int]]:
    """Bins of equal width: shortest, longest, count."""
    low, high = int(lengths.min()), int(lengths.max())
    most = min(BINS, math.ceil(2 * math.sqrt(len(lengths))))
    width = math.ceil((high - low + 1) / most)
    counts, edges = np.histogram(lengths, np.arange(low, high + width + 1, width))
    starts = edges[:-1].tolist()
    return [(at, at + width - 1, n) for at, n in zip(starts, counts.tolist(), strict=True)]


def _whole_lengths(
    work: ShardWriter, opened: list[OpenSource], source: int, sample: Sample
) -> Ints:
    """The lengths of all examples; rows that were cut are prepared again, whole."""
    shard = sample.shard
    # A bad row may have been cut before its first trained token.
    bad = (row for rows in shard.bad.values() for row in rows)
    cut = {*shard.truncated, *shard.too_long, *bad}
    if not cut:
        return sample.tokens.lengths
    again = [numbers for numbers in sample.ranges if cut.intersection(numbers)]
    data = work.data.model_copy(update={"max_length": UNLIMITED, "too_long": "truncate"})
    whole = sample_ranges(replace(work, data=data), opened, source, again).tokens
    others = ~np.isin(sample.tokens.rows, whole.rows)
    return np.concatenate([sample.tokens.lengths[others], whole.lengths])


def _examples(tokens: Tokens) -> Iterator[Example]:
    for number, row in enumerate(tokens.rows.tolist()):
        yield row, *tokens.example(number)


def _measure(result: Audit) -> None:
    """Add facts about lengths, trained tokens and duplicates."""
    shard, tokens, facts = result.sample.shard, result.sample.tokens, result.facts
    points = ", ".join(f"{name} {length:,}" for name, length in quantiles(result.lengths).items())
    facts.append(("lengths", f"{points}; max_length {result.max_length:,}"))
    shares = tokens.targets / tokens.lengths
    trained = (
        f"{shard.trained:,} of {shard.tokens:,} tokens ({shard.trained / shard.tokens:.0%}); of "
        f"an example {shares.min():.0%} to {shares.max():.0%}, median {np.median(shares):.0%}"
    )
    facts += [("trained", trained), ("mask", shard.mask)]
    first_row: dict[bytes, int] = {}
    repeats = {}
    for row, ids, _ in _examples(tokens):
        earlier = first_row.setdefault(xxhash.xxh3_128_digest(ids.tobytes()), row)
        if earlier != row:
            repeats[row] = earlier
    if repeats:
        row, earlier = next(iter(repeats.items()))
        result.warnings.append(
            f"{result.name_rows([*repeats])}: the same tokens as an earlier row "
            f"({result.name_rows([row])} repeats {result.name_rows([earlier])})"
        )


def _judge_tokens(result: Audit, work: ShardWriter) -> None:
    """Find roles that are trained, and end-of-turn tokens that are not."""
    tokens, cut = result.sample.tokens, {*result.sample.shard.truncated}
    spellings: list[bytes] = work.tokenizer.token_bytes.to_pylist()
    header = _header(work).rstrip()
    covered = [
        row
        for row, ids, mask in _examples(tokens)
        if header and _covers(header.encode(), spellings, ids, mask)
    ]
    if covered:
        result.errors.append(
            f"{result.name_rows(covered)}: the mask covers the role '{header}', which the model "
            "never has to write; let the {% generation %} block of the chat template begin after it"
        )
    added = work.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    ends: dict[int, list[int]] = defaultdict(list)
    for row, ids, _ in _examples(tokens):
        if row not in cut:
            last = next((n for n in ids[::-1].tolist() if spellings[n].strip()), -1)
            ends[last if last in added else -1].append(row)
    end, rows = max(ends.items(), key=lambda item: len(item[1]), default=(-1, []))
    if rows and end == -1:
        result.warnings.append(
            f"{result.name_rows(rows)}: no special token ends the example, so the model would not "
            "learn to stop; let the chat template write one, or give the tokenizer an eos_token"
        )
    elif rows and not any(((ids == end) & mask).any() for _, ids, mask in _examples(tokens)):
        result.errors.append(
            f"{result.name_rows(rows)}: '{spellings[end].decode()}' ends the example and is never "
            "trained, so the model would not learn to stop; let the {% generation %} block of the "
            "chat template end after it"
        )


def _header(work: ShardWriter) -> str:
    """The text that names the assistant; empty if there is none, or if it is trained."""
    if not work.tokenizer.chat_template or work.data.train_on == "all":
        return ""
    try:
        chat = Chat(work.tokenizer, work.data)
        question = chat.write([ASK], chat.variables)[0]
        prompt = chat.write([ASK], {**chat.variables, "add_generation_prompt": True})[0]
    except (BadRow, DataError):
        return ""  # the rows are no chats, or the template refuses a question alone
    return prompt.removeprefix(question) if prompt.startswith(question) else ""


def _covers(
    header: bytes, spellings: list[bytes], ids: NDArray[np.int32], trained: NDArray[np.bool_]
) -> bool:
    """Whether a trained span begins with the role."""
    for start in np.flatnonzero(trained & np.diff(trained, prepend=False)).tolist():
        span = ids[start : start + len(header)].tolist()
        if b"".join(spellings[token] for token in span).startswith(header):
            return True
    return False
