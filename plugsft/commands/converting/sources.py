"""Sources of rows and their splits, for the tables of all tools."""

import json
import re
from pathlib import Path
from typing import Any

from .conversion import Conversion
from .steps import count_rows

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
    if len(sources) != 1 or "weight" in sources[0]:
        c.lines["data.sources"] = _line(c, sources, key)
        return
    c.lines["data.source"] = _line(c, sources[0]["source"], key)
    if "split" in sources[0]:
        c.lines["data.split"] = _line(c, sources[0]["split"], "")


def _line(c: Conversion, value: Any, key: str) -> Any:
    c.set("data", value, *([key] if key and not isinstance(c.get(key), list | dict) else []))
    return c.lines.pop("data")


def split_off(split: str, size: float, path: str) -> tuple[str, str] | None:
    """Return the splits of training and evaluation: the last rows are held out."""
    match = PARTS.fullmatch(split)
    if match is None:
        return None
    name, start, stop = match[1], int(match[2] or 0), int(match[3] or 100)
    if size >= 1:
        if match[2] or match[3] or size % 1:
            return None
        return f"{name}[:-{size}]", f"{name}[-{size}:]"
    share = round((stop - start) * size, 6)
    if share == int(share) and share:
        middle = stop - int(share)
        first, last = start or "", stop if stop < 100 else ""
        percent = ("%" if first else "", "%" if last else "")
        return (
            f"{name}[{first}{percent[0]}:{middle}%]",
            f"{name}[{middle}%:{last}{percent[1]}]",
        )
    rows = count_rows(Path(path))
    return split_off(name, max(1, round(rows * size)), path) if rows and "[" not in split else None


def hold_out(c: Conversion, key: str, size: float) -> bool:
    """Hold rows out for evaluations; name the key if that cannot be written."""
    source = c.lines.get("data.source")
    split = c.lines["data.split"].value if "data.split" in c.lines else "train"
    splits = split_off(str(split), size, str(source.value)) if source else None
    if splits is None:
        c.leave(
            key,
            "no split can be written for it; use data.split and eval.split with slices, such as "
            '"train[:95%]" and "train[95%:]"',
        )
        return False
    comment = f"{c.tool} draws these rows at random"
    c.set("data.split", splits[0], key)
    c.set("eval.split", splits[1], key, comment=comment)
    return True


def first_row(c: Conversion) -> dict[str, Any]:
    """Return the first row of a source that is a jsonl or json file here, else nothing."""
    line = c.lines.get("data.source")
    sources = c.lines.get("data.sources")
    path = Path(str(line.value if line else sources.value[0]["source"] if sources else ""))
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf8") as rows:
                row = json.loads(next(rows, "{}"))
        elif path.suffix == ".json":
            row = json.loads(path.read_text("utf8"))[0]
        else:
            return {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return row if isinstance(row, dict) else {}
