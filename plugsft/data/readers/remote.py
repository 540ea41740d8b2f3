"""Rows at s3://, gs://, hf:// and https:// addresses, read by ranges, never copied whole."""

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...base.checksums import digest
from ...base.errors import DataError
from ...base.types import Ints, Row, Rows
from ...recipe.tables import Source
from ..jsonl import JsonLines, LateRows, ensure_rows, find_lines, without_none
from .objects import ENDINGS, Address, explained, find_objects, path_of

SCAN = 8 << 20
"""Bytes of a request while lines are searched."""
FIRST_SCAN = 1 << 18
"""Bytes of an object in which the first lines are searched."""


@dataclass(frozen=True)
class ParquetRows:
    """Rows of a parquet object, read by row groups."""

    address: Address
    start: int
    stop: int
    size: int
    """Bytes of a row, on average."""

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "ParquetRows":
        """Return a range of the rows."""
        stop = min(self.start + stop, self.stop)
        return ParquetRows(self.address, self.start + start, stop, self.size)

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; a field that is null counts as missing."""
        start, stop = self.start + start, min(self.start + stop, self.stop)
        rows: list[Row] = []
        for number, (first, last) in enumerate(pairwise(_groups(self.address))):
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                group = _read_group(self.address, number)
                rows += group.slice(begin - first, end - begin).to_pylist()
        return [without_none(row) for row in rows]

    def sizes(self) -> Ints:
        """Return the average size of a row in bytes, for each row."""
        return np.full(len(self), self.size)


@dataclass(frozen=True)
class JoinedRows:
    """Rows of several objects."""

    parts: tuple[Any, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def part(self, start: int, stop: int) -> Rows:
        """Return a range of the rows: of one object, where it lies in one."""
        cut, offset = [], 0
        for rows in self.parts:
            begin, end = max(start - offset, 0), min(stop - offset, len(rows))
            if begin < end:
                cut.append(rows.part(begin, end))
            offset += len(rows)
        return cut[0] if len(cut) == 1 else JoinedRows(tuple(cut))

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows, or None for a row that is not a JSON object."""
        rows = self.part(start, stop)
        parts = rows.parts if isinstance(rows, JoinedRows) else (rows,)
        return [row for part in parts for row in part.read(0, len(part))]

    def sizes(self) -> Ints:
        """Return the size of each row in bytes, approximately."""
        return np.concatenate([np.zeros(0, np.int64), *(rows.sizes() for rows in self.parts)])


class RemoteSource(LateRows):
    """The rows of one object, of a folder or of a pattern."""

    def __init__(self, source: Source, where: str) -> None:
        self._split, self._where = source.split, where
        self._objects = explained(lambda: find_objects(source.source), where)
        if not self._objects:
            raise DataError(f"{where}: no object; use names that end with {' or '.join(ENDINGS)}")
        self._objects = [address for address in self._objects if address.size]
        if not self._objects:
            raise DataError(f"{where}: is empty; name an object with rows")

    @cached_property
    def identity(self) -> dict[str, str]:
        """The sizes and versions of the objects."""
        versions = [dict(address.version) for address in self._objects]
        return {"objects": digest({"versions": versions}), "split": self._split}

    @cached_property
    def _rows(self) -> JoinedRows:
        rows = explained(lambda: JoinedRows(tuple(map(self._open, self._objects))), self._where)
        if self._split != "train":
            from .dataset import ranges_of

            ranges = ranges_of(self._split, {"train": len(rows)}, self._where)
            rows = JoinedRows(tuple(rows.part(each.start, each.stop) for _, each in ranges))
        return ensure_rows(rows, self._where, self._split)

    def _open(self, address: Address) -> JsonLines | ParquetRows:
        if path_of(address.url).endswith(".parquet"):
            count = _groups(address)[-1]
            return ParquetRows(address, 0, count, address.size // max(1, count))
        first = re.fullmatch(r"train\[:(\d+)\]", self._split)
        limit, size = (int(first[1]), FIRST_SCAN) if first else (0, address.size)
        while True:
            # The beginning of the object is enough if it has more lines than the limit.
            beginning = replace(address, size=min(size, address.size), buffer=min(size, SCAN))
            lines: Any = find_lines(beginning)  # type: ignore[arg-type]
            if size >= address.size or len(lines) > limit:
                return JsonLines(address, lines.starts, lines.stops)  # type: ignore[arg-type]
            size *= 4

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows, or None for a row that is not a JSON object."""
        return explained(lambda: super(RemoteSource, self).read(start, stop), self._where)


@lru_cache(maxsize=16)
def _groups(address: Address) -> list[int]:
    """Return where the row groups of a parquet object begin, and where the last one ends."""
    with address.open() as file:
        facts = pq.read_metadata(file)
    sizes = [facts.row_group(number).num_rows for number in range(facts.num_row_groups)]
    return [0, *np.cumsum(sizes).tolist()]


@lru_cache(maxsize=2)
def _read_group(address: Address, number: int) -> pa.Table:
    """Read a row group; slices that follow each other lie in the same one."""
    with address.open() as file:
        return pq.ParquetFile(file).read_row_group(number)
