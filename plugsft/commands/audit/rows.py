"""What a sample of a source is like, and what in it would make training wrong."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...base.errors import DataError
from ...base.types import Ints, Row
from ...data.chat import Chat
from ...data.formats import TEXTS, BadRow, format_of, read_chat
from ...data.render import renamed, without
from ...data.sample import Sample, sample_ranges
from ...data.slices import CURE_BAD, CURE_LONG, Work, describe_rows, describe_warnings
from ...data.sources import OpenSource
from ...recipe.tables import Data
from ...registry.active import Active
from ...tokens.store import Tokens

SAMPLE, STRETCHES = 1_000, 20
STEP = 1_000
"""Where every row is looked at, so many at a time."""
QUANTILES = (5, 25, 50, 75, 95, 99, 100)
BINS = 12
LONGEST = 2**31 - 1

Example = tuple[int, NDArray[np.int32], NDArray[np.bool_]]
"""A row, its tokens, and which are trained."""


@dataclass
class Audit:
    """A sample of a source, measured and judged."""

    name: str
    total: int
    """Rows of the source."""
    max_length: int
    sample: Sample
    lengths: Ints
    """Tokens of every example, before any is cut or left out for its length."""
    facts: list[tuple[str, str]] = field(default_factory=list)
    """Labels and words; a label may come again."""
    errors: list[str] = field(default_factory=list)
    """What would make training wrong."""
    warnings: list[str] = field(default_factory=list)

    @property
    def looked(self) -> str:
        """Which rows were looked at."""
        rows = len(self.sample.rows)
        if rows == self.total:
            return f"all {rows:,} rows" if rows > 1 else "its only row"
        return f"{rows:,} of {self.total:,} rows, from {len(self.sample.ranges)} places"


def audit(
    work: Work, opened: list[OpenSource], source: int, active: Active, data: Data, everything: bool
) -> Audit:
    """Measure and judge a sample of a source, or all of it; `data` says what stops a run."""
    total = len(opened[source])
    sample = sample_ranges(work, opened, source, spread(total, everything))
    lengths = _whole_lengths(work, opened, source, sample)
    found = Audit(work.sources[source].source, total, work.data.max_length, sample, lengths)
    if sample.shard.examples:
        _measure(found)
        _judge_tokens(found, work)
    found.facts += [("not read", ", ".join(sample.shard.unread) or "no column")]
    found.warnings += describe_warnings(sample.shard.warnings)
    stable, warnings = judge_chats(sample, work, opened[source], active)
    found.facts += [("template", stable)] if stable else []
    found.warnings += warnings
    _judge_rows(found, data)
    return found


def spread(total: int, everything: bool) -> list[range]:
    """Return stretches of rows: some from all over a source, or all of it."""
    if everything or total <= SAMPLE:
        return [range(total)[at : at + STEP] for at in range(0, total, STEP)]
    size = SAMPLE // STRETCHES
    starts = np.linspace(0, total - size, STRETCHES).astype(np.int64).tolist()
    return [range(start, start + size) for start in starts]


def quantiles(lengths: Ints) -> dict[str, int]:
    """Return how long the examples are, from the shorter ones to the longest."""
    found = np.percentile(lengths, QUANTILES, method="inverted_cdf").astype(np.int64).tolist()
    names = [*(f"{point}%" for point in QUANTILES[:-1]), "longest"]
    return dict(zip(names, found, strict=True))


def histogram(lengths: Ints) -> list[tuple[int, int, int]]:
    """Return bins of round, equal width: shortest, longest, how many."""
    low, high = int(lengths.min()), int(lengths.max())
    most = min(BINS, math.ceil(2 * math.sqrt(len(lengths))))
    least = (high - low + 1) / most
    power = 10 ** max(0, math.floor(math.log10(least)))
    width = next(step * power for step in (1, 2, 5, 10) if step * power >= least)
    edges = np.arange(low // width, high // width + 2) * width
    counts, _ = np.histogram(lengths, edges)
    pairs = zip(edges.tolist(), counts.tolist(), strict=False)
    return [(edge, edge + width - 1, count) for edge, count in pairs]


def _whole_lengths(work: Work, opened: list[OpenSource], source: int, sample: Sample) -> Ints:
    """Return the lengths of all examples; those that were cut are made again, whole."""
    shard = sample.shard
    # A bad row may have been cut before its first trained token.
    bad = (row for rows in shard.bad.values() for row in rows)
    cut = {*shard.truncated, *shard.too_long, *bad}
    if not cut:
        return sample.tokens.lengths
    again = [one for one in sample.ranges if cut.intersection(one)]
    data = work.data.model_copy(update={"max_length": LONGEST, "too_long": "truncate"})
    whole = sample_ranges(replace(work, data=data), opened, source, again).tokens
    kept = ~np.isin(sample.tokens.rows, whole.rows)
    return np.concatenate([sample.tokens.lengths[kept], whole.lengths])


def _examples(tokens: Tokens) -> Iterator[Example]:
    for number, row in enumerate(tokens.rows.tolist()):
        yield row, *tokens.example(number)


def _measure(found: Audit) -> None:
    """Say how long examples are, how much of them is trained, and which are there twice."""
    shard, tokens, facts = found.sample.shard, found.sample.tokens, found.facts
    points = ", ".join(f"{length:,} ({name})" for name, length in quantiles(found.lengths).items())
    facts.append(("lengths", f"{points}; max_length {found.max_length:,}"))
    shares = tokens.targets / tokens.lengths
    trained = (
        f"{shard.trained:,} of {shard.tokens:,} tokens ({shard.trained / shard.tokens:.0%}); of "
        f"one example {shares.min():.0%} to {shares.max():.0%}, median {np.median(shares):.0%}"
    )
    facts += [("trained", trained), ("mask", shard.mask)]
    first: dict[bytes, int] = {}
    again = {}
    for row, ids, _ in _examples(tokens):
        earlier = first.setdefault(xxhash.xxh3_128_digest(ids.tobytes()), row)
        if earlier != row:
            again[row] = earlier
    facts.append(("duplicates", describe_rows([*again]) if again else "none"))
    if again:
        row, earlier = next(iter(again.items()))
        found.warnings.append(
            f"{_named([*again])}: the same tokens as an earlier row ({row} repeats {earlier})"
        )


def _judge_tokens(found: Audit, work: Work) -> None:
    """Look for what the model would learn wrongly: roles that are trained, ends that are not."""
    tokens, cut = found.sample.tokens, {*found.sample.shard.truncated}
    spelt: list[bytes] = work.tokenizer.token_bytes.to_pylist()
    header = _header(work).rstrip()
    head = header.encode()
    headed = [row for row, ids, mask in _examples(tokens) if _covers(head, spelt, ids, mask)]
    if headed:
        found.errors.append(
            f"{_named(headed)}: the mask covers the role '{header}', which the model never has to "
            "write; let the {% generation %} block of the chat template begin behind it"
        )
    added = work.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    ends: dict[int, list[int]] = defaultdict(list)
    for row, ids, _ in _examples(tokens):
        if row not in cut:
            last = next((n for n in ids[::-1].tolist() if spelt[n].strip()), -1)
            ends[last if last in added else -1].append(row)
    end, rows = max(ends.items(), key=lambda item: len(item[1]), default=(-1, []))
    if rows and end == -1:
        found.warnings.append(
            f"{_named(rows)}: no token says where the example ends, so that the model would not "
            "learn to stop; let the chat template write one, or give the tokenizer an eos_token"
        )
    elif rows and not any(((ids == end) & mask).any() for _, ids, mask in _examples(tokens)):
        found.errors.append(
            f"{_named(rows)}: '{spelt[end].decode()}' ends the example and is never trained, so "
            "that the model would not learn to stop; let the {% generation %} block of the chat "
            "template end behind it"
        )


def _header(work: Work) -> str:
    """Return what names the assistant, where it may stand in the text and should not be trained."""
    if not work.tokenizer.chat_template or work.data.train_on == "all":
        return ""
    try:
        return Chat(work.tokenizer, work.data).header
    except DataError:
        return ""  # the rows are no chats, or would have said so


def _covers(
    header: bytes, spelt: list[bytes], ids: NDArray[np.int32], trained: NDArray[np.bool_]
) -> bool:
    """Tell whether a trained stretch begins with the role."""
    starts = np.flatnonzero(trained & ~np.concatenate([[False], trained[:-1]]))
    stretches = (ids[at : at + len(header)].tolist() for at in starts.tolist())
    return any(
        b"".join(spelt[token] for token in stretch).startswith(header)
        for stretch in stretches
        if header and header.startswith(spelt[stretch[0]])
    )


def judge_chats(
    sample: Sample, work: Work, opened: OpenSource, active: Active
) -> tuple[str, list[str]]:
    """Say how many conversations are stable, and what the model would not see as they mean it."""
    if any(active.implements(name, ["render"]) for name in active.plugins):
        return "", []
    chats, unstable, spelt = 0, list[int](), dict[int, str]()
    lost: dict[str, list[int]] = defaultdict(list)
    added = work.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    special = re.compile("|".join(re.escape(one.content) for one in added if one.special) or "$^")
    for stretch in sample.ranges:
        read = zip(stretch, opened.read(stretch.start, stretch.stop), strict=True)
        rows = {
            number: renamed(without(row, work.data.ignore), work.data.columns)
            for number, row in read
            if row is not None
        }
        kind = format_of([*rows.values()])
        if kind is None or kind in TEXTS:
            continue
        chat = Chat(work.tokenizer, work.data)
        for number, row in rows.items():
            try:
                talk = read_chat(kind, row)
                text, spans = chat.render(talk)
                if not any(stop > start for start, stop in spans):
                    continue
                if not chat.is_stable(talk):
                    unstable.append(number)
            except BadRow:
                continue
            chats += 1
            for what in _left_out(talk.messages, text):
                lost[what].append(number)
            if found := special.search("\n".join(one["content"] or "" for one in talk.messages)):
                spelt[number] = found[0]
    warnings = [
        f"{_named(numbers)}: the chat template leaves out {what}"
        for what, numbers in sorted(lost.items())
    ]
    if spelt:
        warnings.append(
            f"{_named([*spelt])}: the words hold special tokens, such as "
            f"'{next(iter(spelt.values()))}', which the model reads as its own control tokens"
        )
    if unstable:
        warnings.append(
            f"{_named(unstable)}: an answer does not stand behind what the chat template gives a "
            "model to write it, so that the model is trained on other chats than it will see"
        )
    stable = (
        f"{chats - len(unstable):,} of {chats:,} chats are stable: each answer stands behind "
        "what the template gives a model to write it"
    )
    return stable if chats else "", warnings


def _left_out(messages: list[Row], text: str) -> set[str]:
    """Say what of some messages is not in their text."""
    lost = set()
    for message in messages:
        if (message.get("content") or "").strip() not in text:
            lost.add(f"words of the {message['role']}")
        if str(message.get("reasoning_content") or "").strip() not in text:
            lost.add(f"the reasoning of the {message['role']}")
    return lost


def _named(rows: list[int]) -> str:
    """Name some rows, as a finding begins."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    return f"{len(rows):,} rows ({', '.join(map(str, rows[:5]))}{', ...' * (len(rows) > 5)})"


def _judge_rows(found: Audit, data: Data) -> None:
    """Say which rows stop the run, are left out or cut, and why."""
    shard = found.sample.shard
    bad = [f"{describe_rows(rows)}: {reason}" for reason, rows in sorted(shard.bad.items())]
    found.facts += [("bad rows", one) for one in bad or ["none"]]
    for label, rows in (("too long", shard.too_long), ("truncated", shard.truncated)):
        found.facts.append((label, describe_rows(rows) if rows else "none"))
    if not shard.examples:
        why = bad or [f"all are longer than data.max_length = {data.max_length:,}"]
        looked = len(found.sample.rows)
        found.errors.append(f"not one of {looked:,} rows has a token to train on: {'; '.join(why)}")
        return
    bad = [f"{_named(rows)}: {reason}" for reason, rows in sorted(shard.bad.items())]
    if data.on_bad_row == "error":
        found.errors += [one + CURE_BAD for one in bad]
    else:
        found.warnings += bad
    over = int((found.lengths - data.max_length).clip(0).sum())
    if shard.too_long and data.too_long == "error":
        found.errors.append(
            f"{_named(shard.too_long)}: longer than {data.max_length} tokens{CURE_LONG}"
        )
    elif longer := shard.too_long or shard.truncated:
        fate = "are left out" if shard.too_long else f"lose their ends, {over:,} tokens"
        found.warnings.append(
            f"{_named(longer)}: longer than data.max_length = {data.max_length:,}, and {fate}"
        )
