"""Explain what pydantic refuses in a recipe: the key, the value given, and what is allowed."""

import json
import re
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic_core import ErrorDetails

from ..base.errors import did_you_mean
from ..base.limits import parse_toml
from .parse import fields, table_at
from .tables import short

WANTED = {
    "int_type": "a whole number, such as 2",
    "float_type": "a number, such as 1e-4",
    "bool_type": "true or false",
    "string_type": 'text in quotes, such as "name"',
    "list_type": 'a list, such as ["name"]',
}
"""pydantic's type of error -> the value that is wanted."""
NUMBERS: dict[str, type | tuple[type, ...]] = {
    "int_type": int,
    "float_type": (int, float),
    "bool_type": bool,
}
"""pydantic's type of error -> the types of value that are written without quotes."""
SHORT = {"lr": "learning_rate", "bs": "batch_size", "max_steps": "steps"}
"""What people write for a key."""
EXAMPLE = "`plugsft init sft` writes an example"


def value_of(text: str) -> Any:
    """Parse a value as TOML, else take it as a string, so that paths need no quotes."""
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def explain(
    errors: Sequence[ErrorDetails], table: type[Any], path: str, prefix: tuple[str, ...]
) -> list[str]:
    """Turn pydantic's errors into lines: file, key, the value, the allowed values."""
    lines: dict[str, str] = {}
    for error in errors:
        place = _keys(error["loc"], table)
        key = ".".join((*prefix, *map(_key, place)))
        given, context, kind = error["input"], error.get("ctx", {}), error["type"]
        if kind in ("extra_forbidden", "unexpected_keyword_argument"):
            allowed = [name for name, _ in fields(table_at(table, place[:-1]))]
            hint = did_you_mean(str(place[-1]), allowed)
            if not hint:
                meant = elsewhere(str(place[-1]), table)
                hint = f"; did you mean '{meant}'?" if meant else ";"
            known = f"allowed: {', '.join(allowed)}" if allowed else "it has no options"
            what = f"unknown key (given {short(given)}){hint} {known}"
        elif kind.startswith("missing"):
            what = f"missing; {_example(key, table_at(table, place[:-1]), str(place[-1]))}"
        elif kind == "literal_error":
            expected = context["expected"]
            hint = did_you_mean(str(given), re.findall("'(.*?)'", expected)) or ";"
            what = f"given {short(given)}{hint} allowed: {expected}"
        elif kind == "value_error":
            what = str(context["error"])
        elif kind in ("model_type", "dict_type", "dataclass_type"):
            what = f"given {short(given)}; it should be a table: [{key}], or keys below it in YAML"
        elif kind in WANTED:
            what = f"given {short(given)}; it should be {WANTED[kind]}"
            if isinstance(given, str) and isinstance(value_of(given), NUMBERS.get(kind, ())):
                what += ", without quotes"
        else:
            what = f"given {short(given)}; {error['msg'].replace('Input should', 'it should')}"
        if key in lines:  # the next branch of a union
            lines[key] += f", or {what.partition('; ')[2]}"
        else:
            lines[key] = what
    return [f"{path}: {key or 'the recipe'}: {what}" for key, what in lines.items()]


def _example(key: str, table: type[Any] | None, name: str) -> str:
    """Say what to write for a missing key: its example, or those of a table's keys."""
    inner = table_at(table, [name])
    infos = getattr(inner or table, "__pydantic_fields__", {}).items()
    examples = {
        name: f"{name} = {json.dumps(info.examples[0])}" for name, info in infos if info.examples
    }
    if inner is not None:
        return f"add [{key}] with {', '.join(examples.values())} ({EXAMPLE})"
    return f"set it, for instance {examples[name]}" if name in examples else "set it"


def _keys(loc: Sequence[int | str], table: type[Any] | None) -> Sequence[int | str]:
    """Remove from a location the branches of a union, which are not keys."""
    for depth, part in enumerate(loc):
        kind = dict(fields(table)).get(str(part))
        branches = [branch for branch in get_args(kind) if branch is not NoneType]
        if get_origin(kind) in (Union, UnionType) and len(branches) > 1:
            return loc[: depth + 1]
        table = table_at(table, [part])
    return loc


def _key(part: int | str) -> str:
    text = str(part)
    return text if re.fullmatch(r"[\w-]+", text) else repr(text)


def elsewhere(key: str, table: type[Any]) -> str:
    """Find the key of a table below this one: "train.seed"; "" if there is none."""
    key = SHORT.get(key, key)
    for name, _ in fields(table):
        if key in dict(fields(table_at(table, [name]))):
            return f"{name}.{key}"
    return ""
