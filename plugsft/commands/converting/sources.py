"""Sources of rows and their splits."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from .conversion import Conversion

PARTS = re.compile(r"(\w[\w.-]*)(?:\[(?:(\d+)%)?:(?:(\d+)%)?\])?")
"""A split, perhaps with a slice in percent."""
CONFIG = (
    "a source has no configurations; download the files of this one, and use data.source = FILE"
)


def part(source: object, split: object = None, weight: float = 1.0) -> dict[str, Any]:
    """Return a table of data.sources, without its defaults."""
    table: dict[str, Any] = {"source": str(source)}
    if split not in (None, "", "train"):
        table["split"] = str(split)
    return table if weight == 1.0 else {**table, "weight": weight}


def set_sources(c: Conversion, sources: list[dict[str, Any]], key: str) -> None:
    """Write the sources that `part` returned."""
    keys = [key] if isinstance(c.get(key), str) else []
    if len(sources) != 1 or "weight" in sources[0]:
        c.set("data.sources", sources, *keys)
        return
    c.set("data.source", sources[0]["source"], *keys)
    if "split" in sources[0]:
        c.set("data.split", sources[0]["split"])


@cache
def count_rows(path: Path) -> int | None:
    """Count the rows of a jsonl or json file that lies here."""
    try:
        if path.suffix == ".json":
            rows = json.loads(path.read_text("utf8"))
            return len(rows) if isinstance(rows, list) else None
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
    except (OSError, ValueError, TypeError):
        pass
    return None


def split_off(split: str, size: float, path: str) -> tuple[str, str] | None:
    """Return the splits of training and evaluation: the last rows are held out."""
    match = PARTS.fullmatch(split)
    if match is None:
        return None
    name, start, stop = match[1], int(match[2] or 0), int(match[3] or 100)
    whole = "[" not in split
    if size >= 1:
        return (f"{name}[:-{size:g}]", f"{name}[-{size:g}:]") if whole and size % 1 == 0 else None
    share = round((stop - start) * size, 6)
    if share == int(share) and share:
        middle = stop - int(share)
        first, last = f"{start}%" if start else "", f"{stop}%" if stop < 100 else ""
        return f"{name}[{first}:{middle}%]", f"{name}[{middle}%:{last}]"
    rows = count_rows(Path(path))
    return split_off(name, max(1, round(rows * size)), path) if rows and whole else None


def hold_out(c: Conversion, key: str, size: float) -> bool:
    """Hold rows out for evaluations; name the key if that cannot be written."""
    source, split = c.value("data.source"), c.value("data.split") or "train"
    splits = split_off(split, size, source) if source else None
    if splits is None:
        c.leave(
            key,
            "no split can be written for it; use data.split and eval.split with slices, such as "
            '"train[:95%]" and "train[95%:]"',
        )
        return False
    c.set("data.split", splits[0], key)
    c.set("eval.split", splits[1], key, comment=f"{c.tool} draws these rows at random")
    return True


def first_row(c: Conversion) -> dict[str, Any]:
    """Return the first row of a source that is a jsonl or json file here, else nothing."""
    sources = c.value("data.sources") or [{"source": c.value("data.source")}]
    path = Path(str(sources[0]["source"]))
    try:
        if path.suffix == ".json":
            row = json.loads(path.read_text("utf8"))[0]
        else:
            with path.open(encoding="utf8") as rows:
                row = json.loads(next(rows, "{}"))
    except (OSError, ValueError, LookupError):
        return {}
    return row if isinstance(row, dict) else {}
