"""Rows that hold their tokens already: checked and masked, never tokenized.

`input_ids` has a row's tokens. `labels` has the same tokens where they are trained and -100
elsewhere, unshifted; `loss_mask`, `completion_mask` and `assistant_masks` have 1 where a token is
trained. `seq_lengths`, `position_ids` or the numbers in `attention_mask` tell the documents of a
row that another tool has packed: each becomes an example. `attention_mask` is 0 on padding.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...base.types import Ints, Rows, Shard, Slice
from ...recipe.tables import FORMATS, Data
from ...tokens.schema import WEIGHT
from ...tokens.shards import Examples, count_true, numpy_of
from ...tokens.tokenizer import Tokenizer
from ..jsonl import why_unreadable
from ..messages import BadRow
from ..unread_columns import ensure_read
from .token_rows import (
    IDS,
    LABELS,
    LISTS,
    MASKS,
    PLACES,
    UNTRAINED,
    Block,
    cut_out,
    documents_of,
    flat_lists,
    lists_of,
    wrong_rows,
)

READ = {*LISTS, WEIGHT, "length", "token_type_ids", "num_truncated_tokens"}
"""Columns that are read, or say nothing new."""
CUT = "no trained token within data.max_length; left out"
"""Reason of a row that is cut before its first trained token."""


class UnusableRows(Exception):
    """Why no row of a slice can be used."""


@dataclass
class Reader:
    """Reads the rows of one slice, and records what is wrong with them."""

    data: Data
    vocabulary: int
    shard: Shard
    first: int
    """Number of the slice's first row in the source."""
    ids: list[NDArray[Any]] = field(default_factory=list)
    masks: list[NDArray[np.bool_]] = field(default_factory=list)
    columns: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    """Of each example: its length, its row, its weight."""

    def examples(self, rows: Rows) -> Examples:
        """Return the examples of a slice."""
        for block in self._blocks(rows):
            self._add(self._check(block))
        columns = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        counts = columns.get("count", np.zeros(0, np.int64))
        return Examples(
            np.concatenate([np.zeros(0, np.int32), *self.ids]),
            np.concatenate([np.zeros(0, np.bool_), *self.masks]),
            counts,
            np.ones_like(counts),
            columns.get("row", counts) + self.first,
            {WEIGHT: columns[WEIGHT]} if WEIGHT in columns else {},
        )

    def _bad(self, numbers: Ints, why: str) -> None:
        if len(numbers):
            self.shard.bad.setdefault(why, []).extend((numbers + self.first).tolist())

    def _blocks(self, rows: Rows) -> Iterator[Block]:
        blocks = getattr(rows, "blocks", None)
        if blocks is None:
            yield self._listed(rows)
            return
        number = 0
        for batch in blocks():
            yield self._mapped(batch, number)
            number += len(batch)

    def _mapped(self, batch: pa.RecordBatch, number: int) -> Block:
        """Return a record batch as arrays, without a copy."""
        numbers = np.arange(number, number + len(batch))
        batch = batch.select([n for n in batch.schema.names if n not in self.data.ignore])
        batch = batch.rename_columns([_ours(name, self.data) for name in batch.schema.names])
        wanted = batch.schema.names
        self._judge([name for name in wanted if batch[name].null_count < len(batch)], numbers)
        present = [name for name in LISTS if name in wanted]
        null = np.zeros(len(batch), np.bool_)
        for name in present:
            kind = batch.schema.field(name).type
            value = getattr(kind, "value_type", pa.null())
            if not (pa.types.is_integer(value) or pa.types.is_boolean(value)):
                raise UnusableRows(f"column '{name}' holds {kind}, not lists of integers")
            null |= numpy_of(batch[name].is_null().cast("uint8")) > 0
            if batch[name].flatten().null_count:
                raise UnusableRows(f"column '{name}': a list holds null; write numbers only")
        if null.any():
            self._bad(numbers[null], "a list is null")
            batch, numbers = batch.filter(pa.array(~null)), numbers[~null]
        lists = {name: flat_lists(batch[name]) for name in present}
        weights = _weights(batch[WEIGHT]) if WEIGHT in wanted else None
        return Block(numbers, lists, weights)

    def _listed(self, rows: Rows) -> Block:
        """Return rows of JSON as arrays; record those that are no lists of numbers."""
        numbers, good = list[int](), list[dict[str, Any]]()
        for number, row in enumerate(rows.read(0, len(rows))):
            if row is None:
                self._bad(np.array([number]), why_unreadable(rows, number))
                continue
            row = {name: row[name] for name in row if row[name] is not None}
            row = {_ours(name, self.data): row[name] for name in row.keys() - {*self.data.ignore}}
            try:
                self.shard.unread = sorted({*self.shard.unread, *row}.difference(READ))
                self._warn(ensure_read(row, READ), np.array([number]))
                good.append(lists_of(row))
                numbers.append(number)
            except BadRow as error:
                self._bad(np.array([number]), str(error))
        names = {name for row in good for name in row}
        for name in names - {WEIGHT}:
            for at in [at for at, row in enumerate(good) if name not in row][::-1]:
                self._bad(np.array([numbers[at]]), f"no '{name}', which other rows have")
                del numbers[at], good[at]
        lists = {
            name: (
                np.concatenate([np.zeros(0, np.int64), *(row[name] for row in good)]),
                np.array([len(row[name]) for row in good], np.int64),
            )
            for name in LISTS
            if name in names or name == IDS
        }
        weights = np.array([row.get(WEIGHT, 1.0) for row in good]) if WEIGHT in names else None
        return Block(np.array(numbers, np.int64), lists, weights)

    def _judge(self, columns: Collection[str], numbers: Ints) -> None:
        """Refuse columns that change the meaning of rows and that nothing reads."""
        self.shard.unread = sorted({*self.shard.unread, *columns}.difference(READ))
        try:
            self._warn(ensure_read(dict.fromkeys(columns, True), READ), numbers)
        except BadRow as error:
            raise UnusableRows(str(error)) from error

    def _warn(self, warnings: list[str], numbers: Ints) -> None:
        for warning in warnings:
            counted = self.shard.warnings.setdefault(warning, {"count": 0, "rows": []})
            counted["count"] += len(numbers)
            counted["rows"] = (counted["rows"] + (numbers[:10] + self.first).tolist())[:10]

    def _check(self, block: Block) -> Block:
        """Return the block without bad rows."""
        counts = block.lists[IDS][1]
        good = counts > 0
        self._bad(block.numbers[~good], "no token")
        for name, (_, lengths) in block.lists.items():
            if name != "seq_lengths" and not np.array_equal(lengths, counts):
                wrong = good & (lengths != counts)
                self._bad(block.numbers[wrong], f"'{name}' is not as long as '{IDS}'")
                good &= ~wrong
        if not good.all():
            block = block.keep(good)
        for why, wrong in wrong_rows(block, self.vocabulary):
            if wrong.any():
                self._bad(block.numbers[wrong], why)
                return self._check(block.keep(~wrong))
        return block

    def _add(self, block: Block) -> None:
        """Add the examples of checked rows: one a document."""
        ids = block.lists[IDS][0]
        starts, lengths, rows = documents_of(block)
        mask = self._mask(block)
        mask[starts] = False
        fits = np.minimum(lengths, self.data.max_length)
        cut = fits < lengths
        trained = count_true(*cut_out(mask, starts, fits)) > 0
        self._record(block, rows, cut, trained)
        good = trained if self.data.too_long == "truncate" else trained & ~cut
        starts, fits, rows = starts[good], fits[good], rows[good]
        self.masks.append(cut_out(mask, starts, fits)[0])
        self.ids.append(cut_out(ids, starts, fits)[0].astype(np.int32))
        self.columns.setdefault("count", []).append(fits)
        self.columns.setdefault("row", []).append(block.numbers[rows])
        if block.weights is not None:
            self.columns.setdefault(WEIGHT, []).append(block.weights[rows])

    def _record(self, block: Block, rows: Ints, cut: Any, trained: Any) -> None:
        """Record rows that were cut, left out, or have no trained token."""
        truncate, size = self.data.too_long == "truncate", len(block.numbers)
        useful = np.bincount(rows[trained], minlength=size) > 0
        long = np.bincount(rows[cut], minlength=size) > 0
        numbers = block.numbers + self.first
        if truncate:
            self.shard.truncated += numbers[long & useful].tolist()
            if (~useful & long).any():
                self._warn([CUT], block.numbers[~useful & long])
        else:
            self.shard.too_long += numbers[long].tolist()
        self._bad(block.numbers[~useful & ~long], "no trained token")
        untrained = ~trained & useful[rows]
        if untrained.any():
            warning = "a packed document has no trained token, and is left out"
            self._warn([warning], block.numbers[np.unique(rows[untrained])])

    def _mask(self, block: Block) -> NDArray[np.bool_]:
        ids = block.lists[IDS][0]
        names = [name for name in (LABELS, *MASKS) if name in block.lists]
        mask = np.ones(len(ids), np.bool_)
        for name in names:
            values = block.lists[name][0]
            mask &= values != UNTRAINED if name == LABELS else values.astype(np.bool_, copy=False)
        documents = next((n for n in ("seq_lengths", *PLACES) if n in block.lists), None)
        self.shard.mask = (
            f"the rows' own tokens, trained by {' and '.join(names) or 'train_on = all'}; "
            + (f"documents by {documents}" if documents else "a row is one example")
        )
        return mask


def is_ready(rows: Rows, data: Data) -> bool:
    """Tell whether rows hold their tokens already."""
    return _have_tokens(_columns(rows, data))


def ready_examples(
    part: Slice, shard: Shard, data: Data, tokenizer: Tokenizer, renderer: str
) -> Examples | None:
    """Return the examples of a slice; None if its rows do not hold their tokens.

    `renderer` names who answers `render`.
    """
    columns = _columns(part.rows, data)
    if not _have_tokens(columns):
        return None
    own = sorted(columns.intersection((LABELS, *MASKS)))
    rows = f"rows of tokens ({IDS})"
    if " of plugin" in renderer:
        raise UnusableRows(
            f"{rows} cannot be used with {renderer}, which reads rows before they are tokens: name "
            "the rows that these were made of, or remove the plugin"
        )
    if not own and data.train_on != "all":
        raise UnusableRows(
            f"{rows} without {LABELS} or a mask ({', '.join(MASKS)}): set data.train_on = "
            '"all" to train on every token'
        )
    if own and data.train_on != "assistant":
        raise UnusableRows(
            f'{rows} have their own {own[0]}, so data.train_on = "{data.train_on}" has no '
            f'effect: remove it, or set data.ignore = {own} with data.train_on = "all"'
        )
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    vocabulary = max(len(tokenizer), *(number + 1 for number in added), 0)
    return Reader(data, vocabulary, shard, part.start).examples(part.rows)


def _have_tokens(columns: set[str]) -> bool:
    formatted = any(columns.issuperset(needed) for needed in FORMATS.values())
    return IDS in columns and (not formatted or not columns.isdisjoint((LABELS, *MASKS)))


def _columns(rows: Rows, data: Data) -> set[str]:
    """Return the columns of the first rows that have any, under our names."""
    names, start, stop = set[str](), 0, min(3, len(rows))
    while not names and start < stop:
        names = {name for row in rows.read(start, stop) for name in row or ()}
        start, stop = stop, min(stop + 1000, len(rows))
    return {_ours(name, data) for name in names.difference(data.ignore)}


def _ours(name: str, data: Data) -> str:
    return next((ours for ours, yours in data.columns.items() if yours == name), name)


def _weights(column: pa.Array) -> NDArray[Any]:
    """Return the weights of rows; a row without one counts 1."""
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise UnusableRows(f"column '{WEIGHT}' holds {kind}, and should hold numbers")
    return numpy_of(column.cast("float64").fill_null(1.0))
