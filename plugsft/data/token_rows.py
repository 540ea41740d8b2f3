"""Rows that hold their tokens already: checked, never tokenized.

`input_ids` has a row's tokens. `labels` has the same tokens where they are trained and -100
elsewhere, unshifted. A row is one example. Other masks, padding, and rows that another tool has
packed are refused with what converts them: there is one way to say what is trained, and the
plugins that pack need each document's own length.
"""

from functools import partial
from typing import Any

import numpy as np

from ..base.types import Encoded, Ints, Rendered, Row
from ..recipe.capabilities import Capability
from ..recipe.tables import Data
from ..tokens.schema import WEIGHT
from ..tokens.tokenizer import Tokenizer
from .examples import Mask
from .formats import BadRow, format_of, require
from .render import MASKS, judge_columns, read_rows, renamed

UNTRAINED = -100
"""The label of tokens that are not trained."""
TO_LABELS = (
    "'{name}' is not read; write it as labels: rows = rows.map(lambda row: {{\"labels\": [token if "
    'trained else -100 for token, trained in zip(row.get("labels", row["input_ids"]), '
    'row["{name}"])]}}, remove_columns="{name}")'
)
TO_DOCUMENTS = (
    "'{name}' is of rows that another tool has packed: name the rows as they were before, and add "
    f"{Capability.bundled('packed_rows').table}; docs/data.md takes packed rows apart"
)
WITHOUT_PADDING = (
    "'{name}' is not 1 for each token; take padding out: rows = rows.map(lambda row: {{name: "
    '[value for value, seen in zip(row[name], row["{name}"]) if seen] for name in row if '
    "isinstance(row[name], list)}}). If it numbers documents, another tool has packed the rows: "
    "docs/data.md takes them apart"
)
CURES = {
    **dict.fromkeys(MASKS, TO_LABELS),
    "attention_mask": WITHOUT_PADDING,
    **dict.fromkeys(("position_ids", "seq_lengths"), TO_DOCUMENTS),
}
"""Columns of other tools -> what is wrong with them, and the cure."""
READ_COLUMNS = {
    *("input_ids", "labels", WEIGHT, *CURES),
    *("length", "token_type_ids", "num_truncated_tokens"),
}
"""Columns that are read, or say nothing new."""


def hold_tokens(row: Row) -> bool:
    """Tell whether rows with the columns of this one hold their tokens already."""
    return "input_ids" in row and ("labels" in row or format_of(row) is None)


def read_tokens(
    rows: list[Row], tokenizer: Tokenizer, data: Data
) -> tuple[Rendered, Encoded, Mask]:
    """Read rows of tokens: as rendered, as encoded, and which tokens are trained."""
    told = "labels" if data.train_on == "assistant" else "train_on = all"
    result = Rendered(read=READ_COLUMNS, mask=f"the rows' own tokens, trained by {told}")
    judge_columns(rows, result, data)
    named = [renamed(row, data) for row in rows]
    read = partial(_read_row, data.train_on, len(tokenizer.token_bytes))
    ids, masks = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
    for number, (row_ids, row_mask) in read_rows(named, read, result):
        result.rows.append(number)
        ids.append(row_ids)
        masks.append(row_mask)
    counts = np.array([*map(len, ids[1:])], np.int64)
    encoded = Encoded(np.concatenate(ids).astype(np.int32), counts, np.zeros(0, np.int64))
    return result, encoded, np.concatenate(masks)


def _read_row(train_on: str, vocabulary: int, row: Row) -> tuple[Ints, Mask]:
    """Read the tokens of a row, and which of them are trained."""
    ids = _integers(row, "input_ids")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise BadRow(
            f"a token id outside of the tokenizer's {vocabulary:,} entries: another tokenizer made "
            "these rows; name it in model.tokenizer"
        )
    of_one_example = {"attention_mask": [1] * len(ids), "position_ids": [*range(len(ids))]}
    for name, cure in CURES.items():
        if row.get(name) not in (None, of_one_example.get(name)):
            raise BadRow(cure.format(name=name))
    labelled = row.get("labels") is not None
    if train_on != ("assistant" if labelled else "all"):
        raise BadRow(
            'rows of tokens with labels are trained by them, with data.train_on = "assistant", and '
            'those without labels on every token, with data.train_on = "all"; '
            'data.ignore = ["labels"] leaves labels out'
        )
    labels = _integers(row, "labels") if labelled else ids
    trained: Mask = labels != UNTRAINED
    if len(labels) != len(ids) or (labels != ids)[trained].any():
        raise BadRow(
            "'labels' is not, for each token, the token itself or -100: write it unshifted"
        )
    trained[0] = False  # nothing predicts a first token
    return ids, trained


def _integers(row: Row, name: str) -> Any:
    values = require(row, name)
    if not isinstance(values, list) or {*map(type, values)} != {int}:  # true is no integer
        raise BadRow(f"'{name}' is not a list of integers, or is empty")
    return np.array(values)
