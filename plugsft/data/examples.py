"""From encoded texts to examples: which tokens are trained, and which examples are left out."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import PluginError
from ..base.types import Encoded, Ints, Rendered, Shard, Span
from ..recipe.tables import Data
from ..tokens.schema import WEIGHT
from ..tokens.shards import Examples, count_true, offsets_of, places_of, shared_prefix
from ..tokens.tokenizer import num_bytes
from .row_names import counted

Mask = NDArray[np.bool_]
"""A boolean for each token, text or example."""
TRUNCATED = "no trained token, or two equal answers, within data.max_length; left out"
"""Warning of rows, or of turns, that are cut before what they teach."""
WEIGHTLESS = "weight 0; left out"


def ensure_encoded(encoded: Encoded, texts: int, where: str) -> None:
    """Refuse tokens that are no integers, or whose counts do not fit the number of texts."""
    arrays = [*map(np.asarray, (encoded.ids, encoded.counts, encoded.ends))]
    ids, counts, ends = map(len, arrays)
    if any(array.size and array.dtype.kind not in "iu" for array in arrays):
        kinds = ", ".join(str(array.dtype) for array in arrays)
        raise PluginError(f"{where} gave ids, counts and ends of {kinds}; all are integers")
    if counts != texts or not ids == ends == arrays[1].sum():
        raise PluginError(
            f"{where} gave {counts:,} counts for {texts:,} texts, {ids:,} ids and {ends:,} ends "
            f"for {arrays[1].sum():,} tokens; it must give each text its count, and each token "
            "its id and its end"
        )


def trained_mask(encoded: Encoded, rendered: Rendered) -> Mask:
    """Mark the tokens that are targets."""
    mask = target_mask(encoded, rendered.texts, rendered.spans)
    align_pairs(encoded, rendered, mask)
    return mask


def target_mask(encoded: Encoded, texts: list[str], spans: list[list[Span]]) -> Mask:
    """Mark the tokens that a span of characters touches; never a text's first token."""
    starts, stops, owners = _byte_spans(texts, spans)
    ends, offsets = encoded.ends, offsets_of(encoded.counts)
    first = np.searchsorted(ends, starts, "right")
    # Several tokens may be bytes of the last character, and an end-of-text token that the
    # tokenizer adds has no character of its own.
    last = np.searchsorted(ends, stops, "right")
    last = np.maximum(last, np.searchsorted(ends, stops, "left") + 1)
    last = np.minimum(last, offsets[owners + 1])
    # The number of spans that a token is in changes where one begins, and behind its last token.
    changes = np.zeros(len(ends) + 1, np.int32)
    np.add.at(changes, first, 1)
    np.add.at(changes, np.maximum(first, last), -1)
    mask = np.cumsum(changes[:-1], dtype=np.int32) > 0
    mask[offsets[:-1][encoded.counts > 0]] = False
    return mask


def _byte_spans(texts: list[str], spans: list[list[Span]]) -> Ints:
    """Find where spans start and stop in the joined texts, in bytes, and the text of each."""
    found, position = list[tuple[int, int, int]](), 0
    for number, (text, text_spans) in enumerate(zip(texts, spans, strict=True)):
        done = 0
        for start, stop in text_spans if len(text_spans) == 1 else sorted(text_spans):
            start = max(start, done)
            if stop > start:
                begin = position + num_bytes(text, done, start)
                position = begin + num_bytes(text, start, stop)
                found.append((begin, position, number))
                done = stop
        position += num_bytes(text, done, len(text))
    return np.array(found, np.int64).reshape(-1, 3).T


def align_pairs(encoded: Encoded, rendered: Rendered, mask: Mask) -> None:
    """Train both answers of a pair from the first token on in which they may differ.

    Only then do their log-probabilities condition on the same tokens. A tokenizer may merge the end
    of a prompt with one answer and not with the other. A chat template may ask for an answer
    without reasoning where one of the answers has reasoning.
    """
    offsets = offsets_of(encoded.counts)
    first_texts, num_texts = examples_of(rendered)
    for number in first_texts[num_texts == 2].tolist():
        texts, spans = rendered.texts[number : number + 2], rendered.spans[number : number + 2]
        begin = min((start for text_spans in spans for start, _ in text_spans), default=0)
        if texts[0][:begin] != texts[1][:begin]:
            continue  # they differ before the answer
        start, middle, stop = offsets[number : number + 3].tolist()
        chosen, rejected = mask[start:middle], mask[middle:stop]
        if not (chosen.any() and rejected.any()):
            continue  # an answer without a target: the pair is left out
        prefix = max(1, shared_prefix(encoded.ids, mask, start, middle, stop))
        for tokens in (chosen, rejected):
            first_target = int(tokens.argmax())
            tokens[prefix:first_target] = True


def make_examples(
    encoded: Encoded, mask: Mask, rendered: Rendered, numbers: Ints, data: Data, shard: Shard
) -> Examples:
    """Truncate or leave out examples that are too long.

    The texts of an example follow each other. If one of them is left out, all are. Where a row is
    several chains, each turn is judged as if it were alone: those of a chain that fit stay.
    """
    first_texts, num_texts = examples_of(rendered)
    rendered_rows = np.array(rendered.rows, np.int64)[first_texts]
    rows = numbers[rendered_rows]
    kept_counts = np.minimum(encoded.counts, data.max_length)
    starts = offsets_of(encoded.counts)
    too_long = _any_text(kept_counts < encoded.counts, num_texts)
    is_chain = (num_texts == 1) & (np.bincount(rendered_rows)[rendered_rows] > 1)
    chains = too_long & is_chain
    loses_turns = np.zeros(len(rows), np.bool_)
    for chain in np.flatnonzero(chains).tolist():
        text = first_texts[chain]
        begins, ends = turns_of(mask[starts[text] : starts[text + 1]])
        loses_turns[chain] = begins.max(initial=0) >= data.max_length
        if data.too_long == "truncate":
            ends = np.minimum(ends[begins < data.max_length], data.max_length)
        kept_counts[text] = ends[ends <= data.max_length].max(initial=0)
    kept_tokens = np.ones(len(mask), np.bool_)
    if not np.array_equal(kept_counts, encoded.counts):
        kept_tokens = places_of(encoded.counts) < np.repeat(kept_counts, encoded.counts)
    trained = ~_any_text(count_true(mask & kept_tokens, encoded.counts) == 0, num_texts)
    for pair in np.flatnonzero(too_long & (num_texts == 2)).tolist():
        # Answers that differ only behind the cut teach nothing.
        start, middle, stop = starts[first_texts[pair] :][:3]
        chosen = encoded.ids[start:middle][: data.max_length]
        trained[pair] &= not np.array_equal(chosen, encoded.ids[middle:stop][: data.max_length])
    untrained = rows[~trained & ~too_long].tolist()
    if untrained:
        shard.bad.setdefault("no trained token", []).extend(untrained)
    if data.too_long == "truncate":
        kept = trained
        shard.truncated += rows[too_long & trained].tolist()
        lost = np.unique(rows[too_long & (~trained | loses_turns)]).tolist()
        if lost:
            shard.warnings[TRUNCATED] = counted(lost)
    else:
        kept = trained & (~too_long | chains)
        shard.too_long += rows[too_long].tolist()
    weights = rendered.columns.get(WEIGHT)
    if weights is not None:  # a product with 0 would be nan where a loss is infinite
        counts = np.asarray(weights)[rendered_rows] != 0
        if ignored := np.unique(rows[kept & ~counts]).tolist():
            shard.warnings[WEIGHTLESS] = counted(ignored)
        kept = kept & counts
    kept_texts = np.repeat(kept, num_texts)
    lengths = np.add.reduceat(kept_counts, first_texts)[kept]
    _, first_examples = np.unique(rows[kept], return_index=True)
    shard.kept_rows = len(first_examples)
    shard.longest = int(np.maximum.reduceat(lengths, first_examples).sum())
    kept_tokens &= np.repeat(kept_texts, encoded.counts)
    # The usual case needs no copy.
    chosen_tokens: Any = slice(None) if kept_tokens.all() else kept_tokens
    columns = {}
    if kept.any():  # without examples, their types are unknown
        for name, values in rendered.columns.items():
            columns[name] = np.asarray(values)[rendered_rows[kept]]
    return Examples(
        ids=encoded.ids[chosen_tokens],
        mask=mask[chosen_tokens],
        counts=kept_counts[kept_texts],
        num_sequences=num_texts[kept],
        rows=rows[kept],
        columns=columns,
    )


def examples_of(rendered: Rendered) -> tuple[Ints, Ints]:
    """Find the first text of each example, and its number of texts.

    The texts of an example follow each other, and so do the examples of a row.
    """
    rows = np.array(rendered.rows, np.int64)
    turns = np.array(rendered.turns or np.zeros(len(rows)), np.int64)
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (np.diff(rows) != 0) | (np.diff(turns) != 0)
    first = np.flatnonzero(begins)
    return first, np.diff(np.append(first, len(rows)))


def turns_of(mask: Mask) -> tuple[Ints, Ints]:
    """Find where the trained turns of a text begin and end; its first token is not trained."""
    edges = np.flatnonzero(np.diff(mask, append=False)) + 1
    return edges[::2], edges[1::2]


def _any_text(values: Mask, num_texts: Ints) -> Mask:
    """Say of each example whether one of its texts is marked."""
    return count_true(values, num_texts) > 0
