"""Rows of JSON files, and rows of several places as one.

A jsonl file is read by the offsets of its lines, so that no row stays in memory. Rows may differ in
their fields, which Arrow's reader of JSON refuses. A line that is not a JSON object is one bad row
and does not stop the reading of the file: in its place comes the reason.
"""

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..base.limits import NestedTooDeep, parse_json
from ..base.types import Ints, Row, Rows
from .formats import BadRow, once

MIN_BUFFER, MAX_BUFFER = 1 << 12, 1 << 23
"""Bytes to read at a time, at least for a few rows, and at most to search for lines."""
NO_OBJECT, NO_UTF8, NESTED = "not a JSON object", "not UTF-8", "nested too deeply"


@dataclass(frozen=True, eq=False)
class JsonLines:
    """Lines of a file; only offsets are sent to other processes."""

    path: Path
    offsets: Ints
    """Where each row begins, and where the last one ends; blank lines belong to the row before."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def part(self, start: int, stop: int) -> "JsonLines":
        """Cut a range of the rows."""
        return JsonLines(self.path, self.offsets[start : stop + 1])

    def read(self, start: int, stop: int) -> list[Row | str]:
        """Read rows, and the reason in place of one that is not a JSON object."""
        offsets = self.offsets[min(start, len(self)) : stop + 1].tolist()
        size = offsets[-1] - offsets[0]
        with self.path.open("rb", max(size, MIN_BUFFER)) as file:
            file.seek(offsets[0])
            return [_parse(file.read(end - begin)) for begin, end in pairwise(offsets)]

    def sizes(self) -> Ints:
        """Count the bytes of each row, and of the blank lines behind it."""
        return np.diff(self.offsets)

    def line_numbers(self, rows: Sequence[int]) -> list[int]:
        """Number the lines of rows as an editor does, from 1; in rising order."""
        wanted, found, position = {*self.offsets[list(rows)].tolist()}, list[int](), 0
        with self.path.open("rb", MAX_BUFFER) as file:
            for number, line in enumerate(file, 1):
                if position in wanted:
                    found.append(number)
                if len(found) == len(wanted):
                    break
                position += len(line)
        return found


@dataclass(frozen=True, eq=False)
class RowList:
    """Rows in memory, with their average size in bytes."""

    rows: list[Any]
    size: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, start: int, stop: int) -> "RowList":
        """Cut a range of the rows."""
        return RowList(self.rows[start:stop], self.size)

    def read(self, start: int, stop: int) -> list[Row | str]:
        """Read rows, and the reason in place of one that is not a JSON object."""
        return [row if isinstance(row, dict) else NO_OBJECT for row in self.rows[start:stop]]

    def sizes(self) -> Ints:
        """Count each row as the average one."""
        return np.full(len(self), self.size)


class JoinedRows:
    """Rows of several files, or of several ranges of one."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts
        """The rows of each file or range."""

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def part(self, start: int, stop: int) -> Rows:
        """Cut a range of the rows; where it lies in one part, its lines can be named."""
        cut = [*self._cut(start, stop)]
        return cut[0] if len(cut) == 1 else JoinedRows(cut)

    def read(self, start: int, stop: int) -> list[Row | str]:
        """Read rows, and the reason in place of one that is not a JSON object."""
        return [row for part in self._cut(start, stop) for row in part.read(0, len(part))]

    def sizes(self) -> Ints:
        """Join the sizes of the parts."""
        return np.concatenate([np.zeros(0, np.int64), *(rows.sizes() for rows in self.parts)])

    def _cut(self, start: int, stop: int) -> Iterator[Rows]:
        for rows in self.parts:
            first, last = max(start, 0), min(stop, len(rows))
            if first < last:
                yield rows.part(first, last)
            start -= len(rows)
            stop -= len(rows)


def find_lines(path: Path) -> JsonLines:
    """Find the lines of a file that are not blank."""
    offsets, position = array("q"), 0
    with path.open("rb", MAX_BUFFER) as file:
        for line in file:
            if not line.isspace():
                offsets.append(position)
            position += len(line)
    return JsonLines(path, np.array([*offsets, position], np.int64))


def _parse(text: bytes) -> Row | str:
    """Parse the JSON of a row; return the reason if it is not that of an object."""
    if b"\0" in text:  # UTF-16, whose first line the parser would read
        return NO_UTF8
    try:
        row = parse_json(text.rstrip())
        if not isinstance(row, dict):
            return NO_OBJECT
        ensure_keys_once(text, row)
    except UnicodeDecodeError:
        return NO_UTF8
    except BadRow as error:
        return str(error)
    except (NestedTooDeep, RecursionError):
        return NESTED
    except json.JSONDecodeError as error:
        return f"{NO_OBJECT} ({error.msg} at column {error.colno:,})"
    except ValueError:  # a number of too many digits
        return NO_OBJECT
    return row


def ensure_keys_once(text: bytes, value: Any) -> None:
    """Refuse JSON with a key twice in one object: of its values, the parser took the last.

    Each key has a colon behind it, so few texts are parsed a second time.
    """
    if text.count(b":") != _colons(value):
        json.loads(text, object_pairs_hook=once)


def _colons(value: Any) -> int:
    """Count the colons of a value's JSON; too few where its keys or lists are unusual."""
    if type(value) is str:
        return value.count(":")
    if type(value) is dict:
        return len(value) + sum(map(_colons, value.values()))
    if type(value) is list and value and type(value[0]) in (str, dict, list):
        return sum(map(_colons, value))
    return 0
