"""Read files that users give; refuse those that are nested deeper than Python can follow."""

import copy
import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import from_json


class NestedTooDeep(ValueError):
    """The levels of a value are more than Python can follow."""


@contextmanager
def limited_depth() -> Iterator[None]:
    """Turn the RecursionError of a block that reads a value into NestedTooDeep."""
    try:
        yield
    except RecursionError:
        raise NestedTooDeep("nested too deeply") from None


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError if it is invalid or nested too deeply."""
    try:
        return from_json(text, cache_strings="keys")
    except (TypeError, ValueError):
        # The standard library also takes lone surrogates, byte order marks and other encodings.
        with limited_depth():
            return json.loads(text)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raise ValueError if it is invalid or nested too deeply."""
    with limited_depth():
        tables = tomllib.loads(text)
        copy.deepcopy(tables)  # the parser itself takes any number of dots in a key
        return tables


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
