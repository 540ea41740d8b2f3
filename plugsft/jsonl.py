"""A jsonl file, mapped: a row is found by its line, so nothing is held in memory.

Rows may differ in their fields, which Arrow's reader of JSON refuses; and a line that is no JSON
is one bad row with a number, not the end of the whole file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from .types import Ints, Row

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
    """Rows in memory."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, start: int, stop: int) -> "Held":
        """Return a stretch of the rows."""
        return Held(self._rows[start:stop])

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; None stands for one that is not a JSON object."""
        return [row if isinstance(row, dict) else None for row in self._rows[start:stop]]


def _parse(line: bytes) -> Row | None:
    try:
        row: Any = from_json(line, cache_strings="keys")
    except ValueError:
        # Half characters, byte order marks, depth: the standard library takes more.
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


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
