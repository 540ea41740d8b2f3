"""Rows that hold their tokens already: read as arrays, checked and masked, never tokenized.

`input_ids` has a row's tokens. `labels` has the same tokens where they are trained and -100
elsewhere, unshifted; `loss_mask`, `completion_mask` and `assistant_masks` have 1 where a token is
trained. `attention_mask` is 0 on padding. A row is one example: rows that another tool has packed
are refused, since the plugins that pack need each document's own length.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import DataError
from ..base.types import Encoded, Ints, Rendered, Row
from ..recipe.capabilities import Capability
from ..recipe.tables import Data
from ..tokens.schema import WEIGHT
from ..tokens.shards import count_true, places_of
from ..tokens.tokenizer import Tokenizer
from .formats import BadRow, format_of, read_weight
from .render import judge_columns, lead_row, renamed, without

IDS, LABELS, PADDING, PLACES = "input_ids", "labels", "attention_mask", "position_ids"
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
LISTS = (IDS, LABELS, *MASKS, PADDING, PLACES)
READ = {*LISTS, WEIGHT, "seq_lengths", "length", "token_type_ids", "num_truncated_tokens"}
"""Columns that are read, or say nothing new."""
UNTRAINED = -100
Mask = NDArray[np.bool_]
Lists = dict[str, NDArray[Any]]
"""Column -> the values of a row, or of all rows."""


def hold_tokens(row: Row) -> bool:
    """Tell whether rows with the columns of this one hold their tokens already."""
    masked = not row.keys().isdisjoint((LABELS, *MASKS))
    return IDS in row and (masked or format_of(row) is None)


def read_tokens(
    rows: list[Row], tokenizer: Tokenizer, data: Data
) -> tuple[Rendered, Encoded, Mask]:
    """Return rows of tokens as rendered and encoded, and which tokens are trained."""
    if data.ignore:
        rows = [without(row, data.ignore) for row in rows]
    result = Rendered(read=READ)
    judge_columns(rows, result, data)
    if data.columns:
        rows = [renamed(row, data.columns) for row in rows]
    present = {name for row in rows for name in row if row[name] is not None}
    first = lead_row(rows, data)
    names = [name for name in LISTS if name == IDS or first.get(name) is not None]
    late = present.intersection(LISTS).difference(names)
    own = [name for name in names if name in (LABELS, *MASKS)]
    _ensure_trainable(own, data)
    if "seq_lengths" in present:
        raise DataError(_packed("'seq_lengths'"))
    result.mask = f"the rows' own tokens, trained by {' and '.join(own) or 'train_on = all'}"
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    weights = [1.0] * len(rows)
    for number, row in enumerate(rows):
        try:
            for name in late:
                if row.get(name) is not None:
                    raise BadRow(f"'{name}', which the first rows of the source lack")
            lists = {name: _list(row, name) for name in names}
            _ensure_lengths(lists)
            weights[number] = read_weight(row)
        except BadRow as error:
            result.bad.setdefault(number, str(error))
        if number not in result.bad:
            result.rows.append(number)
            for name, values in lists.items():
                parts[name].append(values)
    if WEIGHT in present:
        result.columns[WEIGHT] = weights
    counts = np.array(list(map(len, parts[IDS])), np.int64)
    start = [np.zeros(0, np.int8)]
    flat: Lists = {name: np.concatenate(start + parts[name]) for name in names}
    return _masked(flat, counts, result, tokenizer)


def _masked(
    lists: Lists, counts: Ints, result: Rendered, tokenizer: Tokenizer
) -> tuple[Rendered, Encoded, Mask]:
    """Leave out wrong rows and padding; return the rest with its mask."""
    ids, places = lists[IDS], places_of(counts)
    shown = lists.get(PADDING, np.ones_like(ids)) > 0
    if (shown & (lists.get(PLACES, places) != places)).any():
        raise DataError(_packed(f"'{PLACES}' that do not count up from 0"))
    if PADDING in lists and (lists[PADDING] > 1).any():
        raise DataError(_packed(f"numbers of documents in '{PADDING}'"))
    rows = np.array(result.rows, np.int64)
    for why, wrong in _wrong_tokens(lists, shown, places, _vocabulary(tokenizer)):
        if wrong.any():
            for row in rows[count_true(wrong, counts) > 0].tolist():
                result.bad.setdefault(row, why)
    good = ~np.isin(rows, [*result.bad])
    keep = shown & np.repeat(good, counts)
    mask = places > 0  # nothing predicts a first token
    if LABELS in lists:
        mask &= lists[LABELS] != UNTRAINED
    for name in lists.keys() & {*MASKS}:
        mask &= lists[name] != 0
    result.rows = rows[good].tolist()
    counts = count_true(keep, counts)[good]
    return result, Encoded(ids[keep].astype(np.int32), counts, np.zeros(0, np.int64)), mask[keep]


def _wrong_tokens(
    lists: Lists, shown: Mask, places: Ints, vocabulary: int
) -> Iterator[tuple[str, Mask]]:
    """Yield what may be wrong with a row, and the tokens where it is."""
    ids = lists[IDS]
    yield (
        f"a token id outside of the tokenizer's {vocabulary:,} entries: another tokenizer made "
        "these rows; name it in model.tokenizer",
        (ids < 0) | (ids >= vocabulary),
    )
    if LABELS in lists:
        labels = lists[LABELS]
        yield (
            f"a label is neither {UNTRAINED} nor its own token: write labels unshifted",
            (labels != ids) & (labels != UNTRAINED),
        )
    for name in MASKS:
        if name in lists:
            yield f"'{name}' holds values other than 0 and 1", (lists[name] | 1) != 1
    hidden_before = np.append(False, ~shown[:-1])[: len(shown)]
    yield f"'{PADDING}' is 0 before its last token", shown & hidden_before & (places > 0)


def _vocabulary(tokenizer: Tokenizer) -> int:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return max(len(tokenizer), *(number + 1 for number in added), 0)


def _list(row: Row, name: str) -> NDArray[Any]:
    """Return a list of integers as an array."""
    value = row.get(name)
    if value is None:
        raise BadRow(f"no '{name}', which other rows have")
    try:
        values = np.asarray(value) if len(value) else np.array(value, np.int64)
    except (ValueError, TypeError, OverflowError):
        values = np.zeros((1, 1))
    if values.ndim != 1 or values.dtype.kind not in "iub":
        raise BadRow(f"'{name}' is not a list of integers")
    return values if values.itemsize < 8 else values.astype(np.int64)  # not unsigned


def _ensure_lengths(lists: Lists) -> None:
    if not len(lists[IDS]):
        raise BadRow("no token")
    for name, values in lists.items():
        if len(values) != len(lists[IDS]):
            raise BadRow(f"'{name}' is not as long as '{IDS}'")


def _ensure_trainable(own: list[str], data: Data) -> None:
    rows = f"rows of tokens ({IDS})"
    if not own and data.train_on != "all":
        raise DataError(
            f"{rows} without {LABELS} or a mask ({', '.join(MASKS)}): set data.train_on = "
            '"all" to train on every token'
        )
    if own and data.train_on != "assistant":
        raise DataError(
            f'{rows} have their own {own[0]}, so data.train_on = "{data.train_on}" has no '
            f'effect: remove it, or set data.ignore = {own} with data.train_on = "all"'
        )


def _packed(sign: str) -> str:
    return (
        f"rows that another tool has packed ({sign}): name the rows as they were before, and add "
        f"{Capability.bundled('packed_rows').table}; docs/data.md takes packed rows apart"
    )
