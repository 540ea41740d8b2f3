"""Rows that hold their tokens already: checked, never tokenized.

`input_ids` has a row's tokens. `labels` has the same tokens where they are trained and -100
elsewhere, unshifted; `loss_mask`, `completion_mask` and `assistant_masks` have 1 where a token is
trained. `attention_mask` is 0 on padding. A row is one example: rows that another tool has packed
are refused, since the plugins that pack need each document's own length.
"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import DataError
from ..base.types import Encoded, Ints, Rendered, Row
from ..recipe.capabilities import Capability
from ..recipe.tables import Data
from ..tokens.schema import WEIGHT
from ..tokens.tokenizer import Tokenizer
from .examples import Mask
from .formats import BadRow, format_of, require
from .render import judge_columns, lead_row, read_rows, renamed

IDS, LABELS, PADDING, PLACES = "input_ids", "labels", "attention_mask", "position_ids"
TRAINED = (LABELS, "loss_mask", "completion_mask", "assistant_masks")
"""Columns that say which tokens are trained."""
DOCUMENTS = "seq_lengths"
READ_COLUMNS = {
    *(IDS, *TRAINED, PADDING, PLACES, WEIGHT, DOCUMENTS),
    *("length", "token_type_ids", "num_truncated_tokens"),
}
"""Columns that are read, or say nothing new."""
UNTRAINED = -100
"""The label of tokens that are not trained."""


def hold_tokens(row: Row) -> bool:
    """Tell whether rows with the columns of this one hold their tokens already."""
    masked = not row.keys().isdisjoint(TRAINED)
    return IDS in row and (masked or format_of(row) is None)


def read_tokens(
    rows: list[Row], tokenizer: Tokenizer, data: Data
) -> tuple[Rendered, Encoded, Mask]:
    """Read rows of tokens: as rendered, as encoded, and which tokens are trained."""
    result = Rendered(read=READ_COLUMNS)
    judge_columns(rows, result, data)
    own = _masks_of(lead_row(rows, data))
    told = " and ".join(own) or "neither"
    if data.train_on != ("assistant" if own else "all"):
        raise DataError(
            f"rows of tokens ({IDS}) are trained by their own labels or mask "
            f"({', '.join(TRAINED)}), and those without labels or a mask with data.train_on = "
            f'"all". These have {told}, so data.train_on = "{data.train_on}" cannot be; '
            "change it, or name the columns to leave out in data.ignore"
        )
    result.mask = f"the rows' own tokens, trained by {told if own else 'train_on = all'}"
    read = partial(_read_row, own, len(tokenizer.token_bytes))
    ids, masks = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
    named = [renamed(row, data) for row in rows]
    for number, (row_ids, row_mask) in read_rows(named, read, result):
        result.rows.append(number)
        ids.append(row_ids)
        masks.append(row_mask)
    counts = np.array([*map(len, ids[1:])], np.int64)
    encoded = Encoded(np.concatenate(ids).astype(np.int32), counts, np.zeros(0, np.int64))
    return result, encoded, np.concatenate(masks)


def _masks_of(row: Row) -> list[str]:
    return [name for name in TRAINED if row.get(name) is not None]


def _read_row(own: list[str], vocabulary: int, row: Row) -> tuple[Ints, Mask]:
    """Read the tokens of a row without padding, and which of them are trained."""
    ids = _integers(row, IDS)
    if not len(ids):
        raise BadRow("no token")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise BadRow(
            f"a token id outside of the tokenizer's {vocabulary:,} entries: another tokenizer made "
            "these rows; name it in model.tokenizer"
        )
    if _masks_of(row) != own:
        first = " and ".join(own) or "neither"
        raise BadRow(f"the first rows of the source have {first}, and it has others")
    mask = np.arange(len(ids)) > 0  # nothing predicts a first token
    for name in own:
        values = _integers(row, name, len(ids))
        trained = values > 0
        if name == LABELS:
            trained = values != UNTRAINED
            if (values != ids)[trained].any():
                raise BadRow("a label is neither -100 nor its own token: write labels unshifted")
        elif (values != trained).any():
            raise BadRow(f"'{name}' holds values other than 0 and 1")
        mask &= trained
    size = len(ids)
    if row.get(PADDING) is not None:
        shown = _integers(row, PADDING, size)
        if shown.min() < 0:
            raise BadRow(f"'{PADDING}' holds values other than 0 and 1")
        if shown.max() > 1:
            raise _packed(f"numbers of documents in '{PADDING}'")
        size = int(shown.sum())
        if not shown[:size].all():
            raise BadRow(f"'{PADDING}' is 0 before its last token")
    if row.get(PLACES) is not None:
        places = _integers(row, PLACES, len(ids))[:size]
        if (places != np.arange(size)).any():
            raise _packed(f"'{PLACES}' that do not count up from 0")
    if row.get(DOCUMENTS) is not None:
        raise _packed(f"'{DOCUMENTS}'")
    return ids[:size], mask[:size]


def _integers(row: Row, name: str, size: int | None = None) -> Ints:
    value = require(row, name)
    try:
        values: NDArray[Any] = np.array(value)
    except ValueError:  # lists of several lengths
        values = np.zeros(())
    kinds = "iu" if name in (IDS, LABELS) else "iub"
    wrong = values.ndim != 1 or (values.size and values.dtype.kind not in kinds)
    if not wrong and values.size and kinds == "iu":  # true among integers has become 1, and false 0
        wrong = any(isinstance(value[place], bool) for place in np.flatnonzero(values >> 1 == 0))
    if wrong:
        raise BadRow(f"'{name}' is not a list of integers")
    if size not in (None, len(values)):
        raise BadRow(f"'{name}' is not as long as '{IDS}'")
    return values.astype(np.int64)


def _packed(sign: str) -> DataError:
    return DataError(
        f"rows that another tool has packed ({sign}): name the rows as they were before, and add "
        f"{Capability.bundled('packed_rows').table}; docs/data.md takes packed rows apart"
    )
