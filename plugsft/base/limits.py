"""Limits on what is read from outside: how deeply it is nested, and how large it is.

Deeper than a few hundred levels, Python's own functions (JSON, TOML, copies, representations) end
in a RecursionError, each at another depth. So depth is checked once, where something is read.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

DEPTH = 200
"""Levels of JSON in data. pydantic's reader, which is tried first, ends there too."""
TABLES = 64
"""Levels of tables and lists in a recipe."""
LARGEST = 1 << 28
"""Bytes of a file of settings or facts that is read at once."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError where it is none, or is nested too deeply."""
    try:
        return from_json(text, cache_strings="keys")
    except (TypeError, ValueError):
        # The standard library also takes half characters, byte order marks, and other encodings.
        try:
            value = json.loads(text)
        except RecursionError:
            raise ValueError(f"nested deeper than {DEPTH} levels") from None
        return check_depth(value, DEPTH)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raise ValueError where it is none, or is nested too deeply."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {TABLES} levels") from None
    check_depth(tables, TABLES)
    return tables


def check_depth(value: Any, most: int) -> Any:
    """Return a value of dicts and lists; raise ValueError where it is nested too deeply."""
    level, depth = [value], 0
    while level := [inner for one in level for inner in _inside(one)]:
        depth += 1
        if depth > most:
            raise ValueError(f"nested deeper than {most} levels")
    return value


def read_text(path: Path) -> str:
    """Read a small text file; raise ValueError where it is too large, or not UTF-8."""
    with path.open("rb") as file:
        # Asked for more bytes than there are, Python takes the memory for all of them first.
        size = os.fstat(file.fileno()).st_size or LARGEST  # a pipe has none
        raw = file.read(min(size, LARGEST) + 1)
    if len(raw) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    return raw.decode()


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; raise ValueError where it holds anything else."""
    value = parse_json(read_text(path))
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, not {type(value).__name__}")
    return value


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        [one for one in value if isinstance(one, Mapping | list)] if isinstance(value, list) else []
    )
