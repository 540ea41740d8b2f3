"""A jsonl file, mapped: a row is found by its line, so nothing is held in memory.

Rows may differ in their fields, which Arrow's reader of JSON refuses; and a line that is no JSON
is one bad row with a number, not the end of the whole file.
"""

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from .types import Ints, Row

PIECE = 1 << 26
NEAR = 1 << 12
"""Bytes between two lines that are still read together."""
NEWLINE, SPACE = ord("\n"), ord(" ")


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
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        text = np.frombuffer(mapped, np.uint8)
        # In pieces: the comparison makes a byte of truth for each byte of text.
        ends = [
            np.flatnonzero(text[at : at + PIECE] == NEWLINE) + at
            for at in range(0, len(text), PIECE)
        ]
        stops = np.concatenate([*ends, [len(text)]])
        starts = np.concatenate([[0], stops[:-1] + 1])
        starts, stops = starts[stops > starts], stops[stops > starts]
        # Looking is only worth it where a line starts with a space.
        odd = np.flatnonzero(text[starts] <= SPACE)
        blank = [n for n in odd.tolist() if not mapped[starts[n] : stops[n]].strip()]
        del text
    return JsonLines(path, np.delete(starts, blank), np.delete(stops, blank))
