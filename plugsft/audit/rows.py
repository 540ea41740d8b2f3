"""Measure a sample of a source, and find rows that would make training wrong."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..base.console import format_count
from ..base.errors import DataError
from ..base.types import Ints, Rows
from ..data.chat import Chat, any_of
from ..data.formats import TEXTS, BadRow, format_of, read_chat
from ..data.prepare import warn_of_turns
from ..data.render import renamed
from ..data.row_names import CURE_LONG, cure_bad, describe_warnings, name_rows
from ..data.sample import Sample, sample_ranges
from ..data.slices import ShardWriter
from ..data.sources import OpenSource, read_lead_row
from ..recipe.tables import Data
from ..registry.active import Active
from ..tokens.ends import ANSWER, ASK

SAMPLE, RANGES = 1_000, 20
"""Rows of a sample, and the ranges that they come from."""
CHUNK = 1_000
"""Rows that are read at a time."""
QUANTILES = {"median": 50, "95th percentile": 95, "99th percentile": 99, "longest": 100}
BINS = 12
UNLIMITED = 2**31 - 1


@dataclass
class Audit:
    """A sample of a source, measured and judged."""

    name: str
    rows: Rows
    """All rows of the source."""
    sample: Sample
    lengths: Ints
    """Tokens of every example, before long ones are cut or dropped."""
    longest: int
    """Tokens of the longest example that is neither: data.max_length."""
    facts: list[tuple[str, str]] = field(default_factory=list)
    """Labels and texts; a label may be repeated."""
    errors: list[str] = field(default_factory=list)
    """Problems that would make training wrong."""
    warnings: list[str] = field(default_factory=list)

    def fail(self, numbers: Iterable[int], text: str) -> None:
        """Note rows that would make training wrong."""
        self.errors.append(f"{name_rows([*numbers], self.rows)}: {text}")

    def warn(self, numbers: Iterable[int], text: str) -> None:
        """Note rows that may be a mistake."""
        self.warnings.append(f"{name_rows([*numbers], self.rows)}: {text}")

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The facts, then the findings."""
        warnings = [("warning", text) for text in self.warnings]
        return [*self.facts, *warnings, *(("error", text) for text in self.errors)]

    @property
    def extent(self) -> str:
        """The extent of the sample, in words."""
        rows, total = len(self.sample.rows), len(self.rows)
        if rows == total:
            return f"all {rows:,} rows" if rows > 1 else "its only row"
        ranges = format_count(len(self.sample.ranges), "range")
        return f"{rows:,} of {total:,} rows, in {ranges}"


def audit(
    work: ShardWriter,
    opened: list[OpenSource],
    source: int,
    active: Active,
    data: Data,
    ranges: list[range],
) -> Audit:
    """Audit rows of a source; `data` tells which problems stop a run."""
    work = replace(work, data=work.data.of(work.sources[source]))
    sample = sample_ranges(work, opened, source, ranges)
    lengths = _whole_lengths(work, opened, source, sample)
    rows = opened[source].part(0, len(opened[source]))
    result = Audit(work.sources[source].source, rows, sample, lengths, data.max_length)
    if sample.shard.examples:
        result.facts += _measure(sample, lengths, data.max_length)
        result.warnings += warn_of_turns(vars(sample.shard))
        _judge_examples(result, work)
    if sample.shard.unread:
        result.facts.append(("unused columns", ", ".join(sample.shard.unread)))
    if not active.having("render"):
        _judge_chats(result, work, opened[source])
    _judge_rows(result, data)
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


def histogram(lengths: Ints, limit: int) -> list[tuple[int, int, int]]:
    """Shortest, longest and count of bins: of equal width up to a limit, and all longer ones."""
    low, high = int(lengths.min()), int(lengths.max())
    end = min(high, limit)
    most = min(BINS, math.ceil(2 * math.sqrt(len(lengths))))
    width = max(1, math.ceil((end - low + 1) / most))
    starts = [*range(low, end + 1, width), *([end + 1] if high > end else [])]
    ends = [start - 1 for start in starts[1:]] + [max(high, starts[-1])]
    counts, _ = np.histogram(lengths, [*starts, ends[-1] + 1])
    return [*zip(starts, ends, counts.tolist(), strict=True)]


def _whole_lengths(
    work: ShardWriter, opened: list[OpenSource], source: int, sample: Sample
) -> Ints:
    """The lengths of all examples; rows that were cut are prepared again, whole."""
    shard = sample.shard
    # A bad row may have been cut before its first trained token.
    cut = {*shard.truncated, *shard.too_long}.union(*shard.bad.values())
    if not cut:
        return sample.tokens.lengths
    again = [numbers for numbers in sample.ranges if cut.intersection(numbers)]
    data = work.data.model_copy(update={"max_length": UNLIMITED, "too_long": "truncate"})
    whole = sample_ranges(replace(work, data=data), opened, source, again).tokens
    others = ~np.isin(sample.tokens.rows, whole.rows)
    return np.concatenate([sample.tokens.lengths[others], whole.lengths])


def _measure(sample: Sample, lengths: Ints, max_length: int) -> list[tuple[str, str]]:
    """Facts about lengths and trained tokens."""
    shard, tokens = sample.shard, sample.tokens
    points = ", ".join(f"{name} {length:,}" for name, length in quantiles(lengths).items())
    pairs = ", of both answers together" if tokens.facts["pairs"] else ""
    shares = tokens.targets / tokens.lengths
    trained = (
        f"{shard.trained:,} of {shard.tokens:,} tokens ({shard.trained / shard.tokens:.0%}); of "
        f"an example {shares.min():.0%} to {shares.max():.0%}, median {np.median(shares):.0%}"
    )
    return [
        ("lengths", f"{points}{pairs}; max_length {max_length:,}"),
        ("trained", trained),
        ("mask", shard.mask),
    ]


def _judge_examples(result: Audit, work: ShardWriter) -> None:
    """Find examples that repeat others, roles that are trained, and ends that are not."""
    tokens, cut = result.sample.tokens, {*result.sample.shard.truncated}
    spellings: list[bytes] = work.tokenizer.token_bytes.to_pylist()
    added = work.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    header, first_row = _header(work).rstrip(), dict[bytes, int]()
    covered, repeats, trained = list[int](), dict[int, int](), set[int]()
    ends: dict[int, list[int]] = defaultdict(list)
    """The last token, -1 if it is not special -> rows."""
    for number, row in enumerate(tokens.rows.tolist()):
        ids, mask = tokens.example(number)
        trained.update(ids[mask].tolist())
        earlier = first_row.setdefault(xxhash.xxh3_128_digest(ids.tobytes()), row)
        if earlier != row:
            repeats[row] = earlier
        if header and _covers(header.encode(), spellings, ids, mask):
            covered.append(row)
        if row not in cut:
            last = next((n for n in ids[::-1].tolist() if spellings[n].strip()), -1)
            ends[last if last in added else -1].append(row)

    for row, earlier in [*repeats.items()][:1]:
        first, again = (name_rows([number], result.rows) for number in (earlier, row))
        result.warn(repeats, f"the same tokens as an earlier row ({again} repeats {first})")
    if covered:
        result.fail(
            covered,
            f"the mask covers the role '{header}', which the model never has to write; let the "
            "{% generation %} block of the chat template begin after it",
        )
    end, rows = max(ends.items(), key=lambda item: len(item[1]), default=(-1, []))
    if rows and end == -1:
        result.warn(
            rows,
            "no special token ends the example, so the model would not learn to stop; let the "
            "chat template write one, or give the tokenizer an eos_token",
        )
    elif rows and end not in trained:
        result.fail(
            rows,
            f"'{spellings[end].decode()}' ends the example and is never trained, so the model "
            "would not learn to stop; let the {% generation %} block of the chat template end "
            "after it",
        )


def _header(work: ShardWriter) -> str:
    """The text that names the assistant; empty if there is none, or if it is trained."""
    if not work.tokenizer.chat_template or work.data.train_on == "all":
        return ""
    try:
        chat = Chat(work.tokenizer, work.data)
        question = chat.write([ASK])
        prompt = chat.write([ASK], add_generation_prompt=True)
    except (BadRow, DataError):
        return ""  # the rows are no chats, or the template refuses a question alone
    return prompt.removeprefix(question) if prompt.startswith(question) else ""


def _unprompted(chat: Chat) -> str:
    """The text before the words of an answer that a server does not write."""
    with suppress(BadRow, DataError):  # the template may refuse this conversation
        prompt = chat.write([ASK], add_generation_prompt=True)
        before, _, _ = chat.write([ASK, ANSWER]).partition(str(ANSWER["content"]))
        if prompt == chat.write([ASK]) and before.startswith(prompt):
            return before.removeprefix(prompt).strip()
    return ""


def _covers(
    header: bytes, spellings: list[bytes], ids: NDArray[np.int32], trained: NDArray[np.bool_]
) -> bool:
    """Whether a trained span begins with the role."""
    for start in np.flatnonzero(trained & np.diff(trained, prepend=False)).tolist():
        span = ids[start : start + len(header)].tolist()
        if b"".join(spellings[token] for token in span).startswith(header):
            return True
    return False


def _judge_rows(result: Audit, data: Data) -> None:
    """Name the rows that stop the run, and those that are dropped, cut or unusual."""
    shard, long = result.sample.shard, f"longer than data.max_length = {data.max_length:,}"
    bad = sorted(shard.bad.items(), key=lambda item: item[1])
    if not shard.examples:
        reasons = [f"{name_rows(numbers, result.rows)}: {reason}" for reason, numbers in bad]
        reasons += describe_warnings(shard.warnings, result.rows)
        why, cure = "; ".join(reasons) or f"all are {long}", cure_bad(shard.bad, drop=False)
        result.errors.append(f"no row has a token to train on: {why}{cure}")
        return
    result.warnings += describe_warnings(shard.warnings, result.rows)
    for reason, numbers in bad:
        if data.on_bad_row == "error":
            result.fail(numbers, reason + cure_bad({reason: numbers}))
        else:
            result.warn(numbers, f"{reason}; dropped")
    if shard.too_long and data.too_long == "error":
        result.fail(shard.too_long, long + CURE_LONG)
    elif shard.too_long:
        result.warn(shard.too_long, f"{long}; dropped")
    if shard.truncated:
        over = int((result.lengths - data.max_length).clip(0).sum())
        result.warn(shard.truncated, f"{long}; cut by {over:,} tokens")


def _judge_chats(result: Audit, work: ShardWriter, opened: OpenSource) -> None:
    """Warn of words that a template leaves out, and of special tokens among them."""
    kind = format_of(read_lead_row(opened, work.data))
    if kind is None or kind in TEXTS:
        return
    special, chat = special_tokens(work), Chat(work.tokenizer, work.data)
    if role := _unprompted(chat):
        result.warnings.append(
            f"the chat template writes '{role}' before an answer, and not as its prompt "
            "(add_generation_prompt): the model learns to write it itself"
        )
    found: dict[str, list[int]] = defaultdict(list)
    read = (opened.read(numbers.start, numbers.stop) for numbers in result.sample.ranges)
    for number, row in zip(result.sample.rows, chain.from_iterable(read), strict=True):
        if not isinstance(row, dict):
            continue
        try:
            conversation = read_chat(kind, renamed(row, work.data), work.data.system)
            variables = {"tools": conversation.tools, **(conversation.variables or {})}
            # With the words behind the last trained turn, where an example may end.
            whole = chat.write(conversation.messages, **variables)
            text = "\n".join([whole, *map("".join, chat.examples(conversation).examples)])
        except BadRow:
            continue
        for message in conversation.messages:
            content = message["content"]
            if content.strip() not in text:
                found[f"the chat template drops words of the {message['role']}"].append(number)
            for token in special.findall(content):
                reads = f"the text contains '{token}', which the model reads as a control token"
                found[reads].append(number)
    for warning, numbers in found.items():
        result.warn(numbers, warning)


def special_tokens(work: ShardWriter) -> re.Pattern[str]:
    """Finds the special tokens in a text: a row may spell one by mistake."""
    added = work.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return any_of([token.content for token in added if token.special])
