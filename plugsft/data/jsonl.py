"""A jsonl file, mapped: a row is found by its line, so nothing is held in memory.

Rows may differ in their fields, which Arrow's reader of JSON refuses; and a line that is no JSON
is one bad row with a number, not the end of the whole file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..base.limits import parse_json
from ..base.types import Ints, Row, Rows

PIECE = 1 << 20
NEAR = 1 << 12
"""Bytes between two lines that are still read together."""
SPACE = ord(" ")


class JsonLines:
    """Lines of a file, by the bytes where they start and stop."""

    def __init__(self, path: Path, starts: Ints, stops: Ints) -> None:
        self.path, self.starts, self.stops = path, starts, stops

    def __len__(self) -> int:
        return len(self.starts)

    def pick(self, rows: Ints) -> "JsonLines":
        """Return some of the rows."""
        return JsonLines(self.path, self.starts[rows], self.stops[rows])

    def part(self, start: int, stop: int) -> "JsonLines":
        """Return a stretch of the rows, as small to send as it is."""
        return JsonLines(self.path, self.starts[start:stop], self.stops[start:stop])

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; None stands for one that is not a JSON object."""
        starts, stops = self.starts[start:stop], self.stops[start:stop]
        gaps = np.flatnonzero(starts[1:] - stops[:-1] > NEAR) + 1
        rows: list[Row | None] = []
        with self.path.open("rb") as file:
            # One read for all lines that stand together.
            for a, b in zip(np.split(starts, gaps), np.split(stops, gaps), strict=True):
                if len(a):
                    file.seek(a[0])
                    text = file.read(b[-1] - a[0])
                    places = zip((a - a[0]).tolist(), (b - a[0]).tolist(), strict=True)
                    rows += [_parse(text[i:j]) for i, j in places]
        return rows

    def sizes(self) -> Ints:
        """Return the bytes of every row."""
        return self.stops - self.starts


class Held:
    """Rows in memory, and the bytes that one of them takes on average."""

    def __init__(self, rows: list[Any], size: int = 0) -> None:
        self._rows, self._size = rows, size

    def __len__(self) -> int:
        return len(self._rows)

    def pick(self, rows: Ints) -> "Held":
        """Return some of the rows."""
        return Held([self._rows[number] for number in rows], self._size)

    def part(self, start: int, stop: int) -> "Held":
        """Return a stretch of the rows: they are in memory, and travel as they are."""
        return Held(self._rows[start:stop], self._size)

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; None stands for one that is not a JSON object."""
        return [row if isinstance(row, dict) else None for row in self._rows[start:stop]]

    def sizes(self) -> Ints:
        """Return the bytes of every row, on average."""
        return np.full(len(self), self._size)


def _parse(line: bytes) -> Row | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def why_unreadable(rows: Rows, number: int) -> str:
    """Say why a row was read as None."""
    if isinstance(rows, JsonLines):
        start, stop = rows.starts[number], rows.stops[number]
        line = np.fromfile(rows.path, np.uint8, stop - start, offset=start).tobytes()
        try:
            parse_json(line.decode())
        except UnicodeDecodeError:
            return "not UTF-8"
        except ValueError as error:
            return str(error) if "nested" in str(error) else "no JSON object"
    return "no JSON object"


def find_lines(path: Path) -> JsonLines:
    """Find the lines of a file; blank ones are no rows."""
    stops, firsts, at, fresh = [], [], 0, True
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            ends = np.fromiter(_newlines(piece), np.int64)
            begins = np.append([0] if fresh else [], ends + 1).astype(np.int64)
            fresh = piece.endswith(b"\n")
            firsts.append(np.frombuffer(piece, np.uint8)[begins[:-1] if fresh else begins])
            stops.append(ends + at)
            at += len(piece)
        ended = np.concatenate([*stops, [at]])
        starts = np.append(0, ended[:-1] + 1)
        blank = ended <= starts
        # Looking at a whole line is only worth it where it starts with a space.
        for number in np.flatnonzero(np.concatenate(firsts) <= SPACE):
            file.seek(starts[number])
            blank[number] |= not file.read(ended[number] - starts[number]).strip()
    return JsonLines(path, starts[~blank], ended[~blank])


def _newlines(text: bytes) -> Iterator[int]:
    """Yield where lines end: searching jumps over long lines, where numpy looks at every byte."""
    found = text.find(b"\n")
    while found >= 0:
        yield found
        found = text.find(b"\n", found + 1)
