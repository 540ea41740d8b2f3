"""Read a jsonl file by the offsets of its lines, so that no row stays in memory.

Rows may differ in their fields, which Arrow's reader of JSON refuses. A line that is not JSON is
one bad row and does not stop the reading of the file.
"""

from array import array
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..base.errors import DataError
from ..base.limits import NestedTooDeep, parse_json
from ..base.types import Ints, Row, Rows

T = TypeVar("T", bound=Sized)

MIN_BUFFER, MAX_BUFFER = 1 << 12, 1 << 23
"""Bytes to read at a time: all adjacent lines at once, but for very long ones."""


class JsonLines:
    """Lines of a file, by the offsets where they start and stop."""

    def __init__(self, path: Path, starts: Ints, stops: Ints) -> None:
        self.path, self.starts, self.stops = path, starts, stops

    def __len__(self) -> int:
        return len(self.starts)

    def part(self, start: int, stop: int) -> "JsonLines":
        """Return a range of the rows; only offsets are sent to other processes."""
        return JsonLines(self.path, self.starts[start:stop], self.stops[start:stop])

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows, or None for a row that is not a JSON object."""
        starts, stops = self.starts[start:stop].tolist(), self.stops[start:stop].tolist()
        size = stops[-1] - starts[0] if starts else 0
        rows = []
        with self.path.open("rb", min(max(size, MIN_BUFFER), MAX_BUFFER)) as file:
            for begin, end in zip(starts, stops, strict=True):
                file.seek(begin)
                rows.append(_parse(file.read(end - begin)))
        return rows

    def sizes(self) -> Ints:
        """Return the size of each row in bytes."""
        return self.stops - self.starts

    def line_numbers(self, rows: Sequence[int]) -> list[int]:
        """Return the line of each row in the file, counting from 1."""
        starts = self.starts[list(rows)].tolist()
        lines, position, last = dict[int, int](), 0, max(starts, default=-1)
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                lines[position] = number
                position += len(line)
                if position > last:
                    break
        return [lines[start] for start in starts]


class RowList:
    """Rows in memory, with their average size in bytes."""

    def __init__(self, rows: list[Any], size: int = 0) -> None:
        self._rows, self._size = rows, size

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, start: int, stop: int) -> "RowList":
        """Return a range of the rows."""
        return RowList(self._rows[start:stop], self._size)

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows, or None for a row that is not a JSON object."""
        return [row if isinstance(row, dict) else None for row in self._rows[start:stop]]

    def sizes(self) -> Ints:
        """Return the average size of a row in bytes, for each row."""
        return np.full(len(self), self._size)


@dataclass(frozen=True)
class JoinedRows:
    """Rows of several files, or of several ranges of one."""

    parts: tuple[Any, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def part(self, start: int, stop: int) -> Rows:
        """Return a range of the rows: of one of the parts, where it lies in one."""
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


class LateRows:
    """A source that finds its rows at the first access: prepared data is not read again."""

    _rows: Any

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, start: int, stop: int) -> Rows:
        """Return a range of the rows."""
        return self._rows.part(start, stop)  # type: ignore[no-any-return]

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows, or None for a row that is not a JSON object."""
        return self._rows.read(start, stop)  # type: ignore[no-any-return]

    def sizes(self) -> Ints:
        """Return the size of each row in bytes, approximately."""
        return self._rows.sizes()  # type: ignore[no-any-return]


def ensure_rows(rows: T, where: str, split: str) -> T:
    """Refuse a source without rows."""
    if not len(rows):
        raise DataError(f"{where} (split '{split}'): has no rows; set another split")
    return rows


def _parse(line: bytes) -> Row | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def without_none(value: Any) -> Any:
    """Return a value without fields that Arrow filled in with None."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    # All values of a list of Arrow are of one type; one of ids may have thousands.
    if isinstance(value, list) and isinstance(next(filter(None, value), None), dict | list):
        return [without_none(inner) for inner in value]
    return value


def why_unreadable(rows: Rows, number: int) -> str:
    """Explain why a row was read as None."""
    if isinstance(rows, JsonLines):
        with rows.path.open("rb") as file:
            file.seek(rows.starts[number])
            line = file.read(rows.stops[number] - rows.starts[number])
        try:
            parse_json(line.decode())
        except UnicodeDecodeError:
            return "not UTF-8"
        except NestedTooDeep as error:
            return str(error)
        except ValueError:
            return "not a JSON object"
    return "not a JSON object"


def name_rows(
    numbers: Sequence[int], rows: Rows | None = None, first: int = 0, count: int | None = None
) -> str:
    """Name rows: "lines 4, 7" of a jsonl file, else "rows 3, 6 (counting from 0)".

    `first` is the number of the first of `rows`. `count` tells if `numbers` are not all.
    """
    numbers = [*dict.fromkeys(numbers)]  # a row may be named for each of its examples
    count = len(numbers) if count is None else count
    word, shown, note = "row", numbers[:5], " (counting from 0)"
    if isinstance(rows, JsonLines):
        word, shown, note = "line", rows.line_numbers([number - first for number in shown]), ""
    more = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return f"{word}{'s' * (count > 1)} {', '.join(map(str, shown))}{more}{note}"


def find_lines(path: Path) -> JsonLines:
    """Find the lines of a file, without blank lines."""
    starts, stops, position = array("q"), array("q"), 0
    with path.open("rb") as file:
        for line in file:
            if not line.isspace():
                starts.append(position)
                stops.append(position + len(line) - line.endswith(b"\n"))
            position += len(line)
    return JsonLines(path, np.array(starts, np.int64), np.array(stops, np.int64))
