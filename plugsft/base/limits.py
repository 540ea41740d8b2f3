"""Limits on the nesting of files that users give.

Beyond a few hundred levels, Python's own functions (JSON, TOML, copy, repr) raise RecursionError,
each at another depth. So depth is checked once, on reading.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

DEPTH = 200
"""Most levels of JSON in data; also the limit of pydantic's parser, which is tried first."""
TABLES = 64
"""Most levels of tables and lists in a recipe."""


class NestedTooDeep(ValueError):
    """The levels of a value are more than plugsft parses."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError if it is invalid or nested too deeply."""
    try:
        return from_json(text, cache_strings="keys")
    except (TypeError, ValueError):
        # The standard library also takes lone surrogates, byte order marks and other encodings.
        try:
            value = json.loads(text)
        except RecursionError:
            raise NestedTooDeep(f"nested deeper than {DEPTH} levels") from None
        return check_depth(value, DEPTH)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raise ValueError if it is invalid or nested too deeply."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise NestedTooDeep(f"nested deeper than {TABLES} levels") from None
    check_depth(tables, TABLES)
    return tables


def check_depth(value: Any, most: int) -> Any:
    """Pass a value of dicts and lists; raise ValueError if it is nested too deeply."""
    level, depth = [value], 0
    while level := [child for container in level for child in _containers(container)]:
        depth += 1
        if depth > most:
            raise NestedTooDeep(f"nested deeper than {most} levels")
    return value


def read_text(path: Path) -> str:
    """Read a text file; raise ValueError if it is not UTF-8."""
    return path.read_bytes().decode("utf-8-sig")  # editors of Windows write a mark first


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object; raise ValueError for anything else."""
    value = parse_json(read_text(path))
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, not {type(value).__name__}")
    return value


def path_inside(folder: Path, name: str) -> Path:
    """Find a file that another file of its folder names; refuse one outside.

    Someone else may have written that file: a manifest, an index of weights.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it names {name}, outside of its folder")
    return folder / path


def _containers(container: Any) -> list[Any]:
    """List the dicts and lists directly inside a dict or list."""
    if isinstance(container, Mapping):
        container = list(container.values())
    if not isinstance(container, list):
        return []
    return [child for child in container if isinstance(child, Mapping | list)]
