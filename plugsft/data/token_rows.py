"""Rows that hold their tokens already: checked, never tokenized.

`input_ids` has a row's tokens. `labels` has the same tokens where they are trained and -100
elsewhere, unshifted; `loss_mask`, `completion_mask` and `assistant_masks` have 1 where a token is
trained. `attention_mask` is 0 on padding. A row is one example: rows that another tool has packed
are refused, since the plugins that pack need each document's own length.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import DataError
from ..base.types import Encoded, Ints, Rendered, Row
from ..recipe.capabilities import Capability
from ..recipe.tables import Data
from ..tokens.schema import WEIGHT
from ..tokens.tokenizer import Tokenizer
from .formats import BadRow, format_of, read_weight
from .render import judge_columns, lead_row, renamed, without

IDS, LABELS, PADDING, PLACES = "input_ids", "labels", "attention_mask", "position_ids"
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
TRAINED = (LABELS, *MASKS)
"""Columns that say which tokens are trained."""
DOCUMENTS = "seq_lengths"
READ = {
    *(IDS, *TRAINED, PADDING, PLACES, WEIGHT, DOCUMENTS),
    *("length", "token_type_ids", "num_truncated_tokens"),
}
"""Columns that are read, or say nothing new."""
UNTRAINED = -100
Mask = NDArray[np.bool_]


def hold_tokens(row: Row) -> bool:
    """Tell whether rows with the columns of this one hold their tokens already."""
    masked = not row.keys().isdisjoint(TRAINED)
    return IDS in row and (masked or format_of(row) is None)


def read_tokens(
    rows: list[Row], tokenizer: Tokenizer, data: Data
) -> tuple[Rendered, Encoded, Mask]:
    """Return rows of tokens as rendered and encoded, and which tokens are trained."""
    result = Rendered(read=READ)
    if data.ignore:
        rows = [without(row, data.ignore) for row in rows]
    judge_columns(rows, result, data)
    rows = [renamed(row, data.columns) for row in rows]
    first = lead_row(rows, data)
    own = [name for name in TRAINED if first.get(name) is not None]
    _ensure_trainable(own, data)
    result.mask = f"the rows' own tokens, trained by {' and '.join(own) or 'train_on = all'}"
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    vocabulary = max(len(tokenizer), *(number + 1 for number in added), 0)
    ids, masks = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
    weights = [1.0] * len(rows)
    for number, row in enumerate(rows):
        try:
            row_ids, row_mask = _tokens_of(row, own, vocabulary)
            weights[number] = read_weight(row)
        except BadRow as error:
            result.bad.setdefault(number, str(error))
        if number not in result.bad:
            result.rows.append(number)
            ids.append(row_ids)
            masks.append(row_mask)
    if any(row.get(WEIGHT) is not None for row in rows):
        result.columns[WEIGHT] = weights
    counts = np.array([len(row_ids) for row_ids in ids[1:]], np.int64)
    encoded = Encoded(np.concatenate(ids).astype(np.int32), counts, np.zeros(0, np.int64))
    return result, encoded, np.concatenate(masks)


def _tokens_of(row: Row, own: list[str], vocabulary: int) -> tuple[Ints, Mask]:
    """Return the tokens of a row without padding, and which of them are trained."""
    for name in TRAINED:
        if name not in own and row.get(name) is not None:
            raise BadRow(f"'{name}', which the first rows of the source lack")
    if row.get(DOCUMENTS) is not None:
        raise DataError(_packed(f"'{DOCUMENTS}'"))
    ids = _integers(row, IDS)
    if not len(ids):
        raise BadRow("no token")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise BadRow(
            f"a token id outside of the tokenizer's {vocabulary:,} entries: another tokenizer made "
            "these rows; name it in model.tokenizer"
        )
    places = np.arange(len(ids))
    mask = places > 0  # nothing predicts a first token
    for name in own:
        values = _integers(row, name, len(ids))
        yes, no = (ids, UNTRAINED) if name == LABELS else (np.ones_like(ids), 0)
        if ((values != yes) & (values != no)).any():
            wrong = f"'{name}' holds values other than 0 and 1"
            if name == LABELS:
                wrong = f"a label is neither {no} nor its own token: write labels unshifted"
            raise BadRow(wrong)
        mask &= values != no
    padding, given = np.ones_like(ids), places
    if row.get(PADDING) is not None:
        padding = _integers(row, PADDING, len(ids))
    if row.get(PLACES) is not None:
        given = _integers(row, PLACES, len(ids))
    shown = padding > 0
    if padding.max() > 1:
        raise DataError(_packed(f"numbers of documents in '{PADDING}'"))
    if (given != places)[shown].any():
        raise DataError(_packed(f"'{PLACES}' that do not count up from 0"))
    size = int(shown.sum())
    if not shown[:size].all():
        raise BadRow(f"'{PADDING}' is 0 before its last token")
    return ids[:size], mask[:size]


def _integers(row: Row, name: str, size: int | None = None) -> Ints:
    """Return a list of integers as an array."""
    if row.get(name) is None:
        raise BadRow(f"no '{name}', which other rows have")
    try:
        values: NDArray[Any] = np.array(row[name])
    except (ValueError, TypeError, OverflowError):
        values = np.zeros(())
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iub"):
        raise BadRow(f"'{name}' is not a list of integers")
    if size not in (None, len(values)):
        raise BadRow(f"'{name}' is not as long as '{IDS}'")
    return values.astype(np.int64)


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
