"""Sources of rows and their splits."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from ...base.errors import RecipeError
from .conversion import Conversion

CONFIG = (
    "a source has no configurations; download the files of this one, and use data.source = FILE"
)


def part(source: object, split: object = None, weight: float = 1.0) -> dict[str, Any]:
    """Return a table of data.sources, without its defaults."""
    table: dict[str, Any] = {"source": str(source)}
    if split not in (None, "", "train"):
        table["split"] = str(split)
    return table if weight == 1.0 else {**table, "weight": weight}


def listed_parts(c: Conversion, key: str) -> list[dict[str, Any]]:
    """Return the sources of a list of data sets, as axolotl and TRL write it."""
    parts = []
    for place in places(c, key):
        if c.get(f"{place}.config", "main") not in ("default", "main"):
            c.leave(f"{place}.config", CONFIG)
        path = c.get(f"{place}.path", c.get(f"{place}.id"))
        files = c.get(f"{place}.data_files", path)
        if files is None:
            raise RecipeError(f"{c.path}: {place} has no path; set it")
        split, weight = c.get(f"{place}.split"), c.read(f"{place}.weight", 1.0)
        files = files if isinstance(files, list) else [files]
        parts += [part(name, split, weight) for name in files]
    return parts


def places(c: Conversion, key: str) -> list[str]:
    """Return the keys of a list's tables."""
    return [f"{key}[{index}]" for index in range(len(c.get(key)))]


def set_sources(c: Conversion, sources: list[dict[str, Any]], key: str) -> None:
    """Write the sources that `part` returned."""
    keys = [key] if isinstance(c.get(key), str) else []
    if len(sources) != 1 or "weight" in sources[0]:
        c.set("data.sources", sources, *keys)
        return
    for option, value in sources[0].items():
        c.set(f"data.{option}", value, *keys)


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
    middle = round(100 - 100 * size, 6)
    if size < 1 and middle.is_integer() and middle < 100:
        rest = f"{middle:g}%"
    else:
        known = count_rows(Path(path))
        rows = max(1, round(known * size)) if known and size < 1 else size
        rest = "" if rows % 1 else f"-{rows:g}"
    return None if "[" in split or not rest else (f"{split}[:{rest}]", f"{split}[{rest}:]")


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
