"""Rows in messages: which ones, why they cannot be used, and what to do about it."""

from collections.abc import Mapping, Sequence

from ..base.types import Counted, Rows
from .jsonl import JsonLines

CURE_LONG = '. Raise data.max_length, or set data.too_long = "truncate" or "drop"'


def name_rows(
    numbers: Sequence[int], rows: Rows | None, first: int = 0, count: int | None = None
) -> str:
    """Name rows, counted from 1: "lines 4, 7" of a jsonl file, else "rows 3, 6".

    `first` is the number of the first of `rows`. `count` tells if `numbers` are not all.
    """
    numbers = [*dict.fromkeys(numbers)]  # a row may be named for each of its examples
    count = len(numbers) if count is None else count
    word, shown = "row", [number + 1 for number in numbers[:5]]
    if isinstance(rows, JsonLines):
        word, shown = "line", rows.line_numbers([number - first for number in numbers[:5]])
    more = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return f"{word}{'s' * (count > 1)} {', '.join(map(str, shown))}{more}"


def describe_bad_rows(bad: dict[str, list[int]], rows: Rows | None, first: int = 0) -> str:
    """Say which rows are bad and why, the most frequent reason first."""
    by_count = sorted(bad.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{name_rows(numbers, rows, first)}: {why}" for why, numbers in by_count)


def cure_bad(bad: Mapping[str, Sequence[int]], drop: bool = True) -> str:
    """Say what to do about bad rows; with `drop`, how to train without them."""
    first = "Correct them" if sum(map(len, bad.values())) > 1 else "Correct it"
    if not bad:
        first = "Raise data.max_length, or weights that are 0"
    return f". {first}" + (', or set data.on_bad_row = "drop"' if drop else "")


def describe_warnings(warnings: Mapping[str, Counted], rows: Rows | None = None) -> list[str]:
    """Name the rows of each warning."""
    return [
        f"{name_rows(counted['rows'], rows, count=counted['count'])}: {warning}"
        for warning, counted in sorted(warnings.items())
    ]


def counted(rows: list[int]) -> Counted:
    """Count rows, and keep the first of them: a data set may have millions."""
    return {"count": len(rows), "rows": rows[:10]}
