"""Rows of tokens as flat arrays: what is wrong with them, and which documents they hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...base.types import Ints, Row
from ...tokens.schema import WEIGHT, WEIGHT_RANGE, is_weight
from ...tokens.shards import count_true, numpy_of, offsets_of
from ..messages import BadRow

IDS, LABELS = "input_ids", "labels"
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
PLACES = ("position_ids", "attention_mask")
LISTS = (IDS, LABELS, *MASKS, *PLACES, "seq_lengths")
UNTRAINED = -100
Lists = tuple[NDArray[Any], NDArray[np.int64]]
"""The values of all rows, and how many each row has."""


@dataclass
class Block:
    """Some rows as flat arrays."""

    numbers: Ints
    """Numbers of the rows in the slice."""
    lists: dict[str, Lists]
    weights: NDArray[Any] | None = None

    def keep(self, good: NDArray[np.bool_]) -> "Block":
        """Return the block without some rows."""
        return Block(
            self.numbers[good],
            {
                name: (flat[np.repeat(good, counts)], counts[good])
                for name, (flat, counts) in self.lists.items()
            },
            None if self.weights is None else self.weights[good],
        )


def flat_lists(array: pa.Array) -> Lists:
    """Return the values of all lists and their lengths."""
    flat = array.flatten()
    if pa.types.is_boolean(flat.type):
        flat = flat.cast("uint8")
    # to_numpy() would import pandas, which takes longer than 100,000 rows.
    return numpy_of(flat), numpy_of(pc.list_value_length(array)).astype(np.int64)


def lists_of(row: Row) -> dict[str, Any]:
    """Return the lists of a row as arrays; raise BadRow if they hold no integers."""
    if IDS not in row:
        raise BadRow(f"no '{IDS}', which other rows have")
    arrays: dict[str, Any] = {}
    for name in LISTS:
        if name in row:
            try:
                values = np.array(row[name] or [0][:0], None if row[name] else np.int64)
            except (ValueError, TypeError, OverflowError):
                values = np.zeros((1, 1))
            if values.ndim != 1 or values.dtype.kind not in "iub":
                raise BadRow(f"'{name}' is not a list of integers")
            arrays[name] = values.astype(np.int64)
    if WEIGHT in row:
        if type(row[WEIGHT]) not in (int, float):
            raise BadRow(f"'weight' should be {WEIGHT_RANGE}")
        arrays[WEIGHT] = float(row[WEIGHT])
    return arrays


def wrong_rows(block: Block, vocabulary: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield reasons, and whether they hold for each row."""
    ids, counts = block.lists[IDS]

    def rows_of(wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return count_true(wrong, counts) > 0 if wrong.any() else np.zeros(len(counts), np.bool_)

    if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
        yield (
            f"a token id outside of the tokenizer's {vocabulary:,} entries: another "
            "tokenizer made these rows; name it in model.tokenizer",
            rows_of((ids < 0) | (ids >= vocabulary)),
        )
    if LABELS in block.lists:
        labels = block.lists[LABELS][0]
        yield (
            f"a label is neither {UNTRAINED} nor its own token: write labels unshifted",
            rows_of((labels != ids) & (labels != UNTRAINED)),
        )
    for name in MASKS:
        if name in block.lists:
            wrong = (block.lists[name][0] | 1) != 1
            yield f"'{name}' holds values other than 0 and 1", rows_of(wrong)
    if "attention_mask" in block.lists:
        shown = block.lists["attention_mask"][0] > 0
        rises = np.zeros(len(ids), np.bool_)
        rises[1:] = ~shown[:-1] & shown[1:]
        rises[offsets_of(counts)[:-1]] = False
        empty = count_true(shown, counts) == 0
        yield "'attention_mask' is 0 before its last token", rows_of(rises) | empty
    if "seq_lengths" in block.lists:
        flat, sizes = block.lists["seq_lengths"]
        sums = np.zeros(len(sizes), np.int64)
        np.add.at(sums, np.repeat(np.arange(len(sizes)), sizes), flat)
        positive = count_true(flat <= 0, sizes) == 0
        yield f"'seq_lengths' do not add up to '{IDS}'", (sums != counts) | ~positive
    elif "position_ids" in block.lists:
        places = block.lists["position_ids"][0]
        breaks = np.ones(len(ids), np.bool_)
        breaks[1:] = places[1:] != places[:-1] + 1
        breaks[offsets_of(counts)[:-1]] = True
        wrong = breaks & (places != 0)
        if "attention_mask" in block.lists:  # padding may have any position
            wrong &= shown
        yield "'position_ids' neither count up nor begin again at 0", rows_of(wrong)
    if block.weights is not None:
        wrong = np.array([not is_weight(value) for value in block.weights.tolist()], np.bool_)
        yield f"'weight' should be {WEIGHT_RANGE}", wrong


def documents_of(block: Block) -> tuple[Ints, Ints, Ints]:
    """Return the start in the block, the length and the row of each document."""
    ids, counts = block.lists[IDS]
    offsets, lists = offsets_of(counts), block.lists
    if not {"seq_lengths", *PLACES} & lists.keys():
        return offsets[:-1], counts, np.arange(len(counts))
    if "seq_lengths" in lists:
        starts = offsets_of(lists["seq_lengths"][0])[:-1]
    else:
        begins = np.zeros(len(ids), np.bool_)
        begins[offsets[:-1]] = True
        if "position_ids" in lists:
            begins |= lists["position_ids"][0] == 0
        else:
            numbers = lists["attention_mask"][0]
            begins[1:] |= (numbers[1:] != numbers[:-1]) & (numbers[1:] > 0)
        starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=len(ids))
    if "attention_mask" in lists:  # without padding
        shown = lists["attention_mask"][0] > 0
        if not shown.all():
            lengths = count_true(shown, lengths)
            starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    return starts, lengths, np.searchsorted(offsets, starts, "right") - 1


def cut_out(values: NDArray[Any], starts: Ints, lengths: Ints) -> Lists:
    """Return the values of spans, and the lengths."""
    if int(lengths.sum()) == len(values):
        return values, lengths
    edges = np.stack([starts, starts + lengths], 1).ravel()
    runs = np.diff(edges, prepend=0, append=len(values))
    return values[np.repeat(np.arange(len(runs)) % 2 == 1, runs)], lengths
