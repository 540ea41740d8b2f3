"""A recipe as plain tables: its keys and defaults, with absolute paths, as TOML."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import tomli_w

from .tables import Recipe


def fields(table: type[Any] | None) -> Iterator[tuple[str, Any]]:
    """Yield the keys and types of a table, or of a plugin's options."""
    for name, info in getattr(table, "__pydantic_fields__", {}).items():
        if info.init is not False:
            yield name, info.annotation


def table_at(table: type[Any] | None, place: Iterable[int | str]) -> type[Any] | None:
    """Find the table below a table by keys and numbers of lists; None if there is none."""
    for part in place:
        if isinstance(part, str):
            kind = dict(fields(table)).get(part)
            inner = [kind, *get_args(kind), *(a for b in get_args(kind) for a in get_args(b))]
            table = next((each for each in inner if hasattr(each, "model_fields")), None)
    return table


def defaults_of(keys: Iterable[str]) -> dict[str, Any]:
    """Give the defaults of a recipe's keys ("train.seed"), for those that have one."""
    defaults = {}
    for key in keys:
        *above, name = key.split(".")
        info = getattr(table_at(Recipe, above), "__pydantic_fields__", {}).get(name)
        if info is not None and not info.is_required():
            defaults[key] = info.get_default(call_default_factory=True)
    return defaults


def flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: {"train.seed": 0, ...}."""
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name what differs."""
    return [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]


def show(names: Iterable[str], then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Show the values of what has changed."""
    return [f"{name} was {_show(then.get(name))} and is {_show(now.get(name))}" for name in names]


def _show(value: Any) -> str:
    return "not set" if value is None else repr(value)


def resolved(recipe: Recipe) -> str:
    """Return the recipe as TOML with all defaults and absolute paths."""
    return tomli_w.dumps(anchored(recipe))


def anchored(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's tables with absolute paths."""
    tables = recipe.model_dump(mode="json", exclude_none=True)
    if "sources" in tables["data"]:
        del tables["data"]["split"]
    return tables
