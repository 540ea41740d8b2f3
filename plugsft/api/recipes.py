"""Recipes from Python: a file or tables, with overrides and plugin objects."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import RecipeError
from ..base.limits import TABLES, check_depth
from ..hooks import PLUGIN
from ..recipe.read import read
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..registry.load import resolve
from .messages import alone, ensure_kind, errors
from .own_plugins import OwnPlugin, announced, describe_plugins

_one_call = threading.Lock()


@dataclass(frozen=True)
class Source:
    """A recipe that is read, and not checked yet."""

    tables: dict[str, Any]
    path: Path
    """Its file, for messages."""
    own: Mapping[str, OwnPlugin]
    """Name -> plugin that was passed as an object."""
    without: Sequence[str] = ()


@contextmanager
def opened(
    recipe: str | Path | Mapping[str, Any],
    plugins: Sequence[object] | Mapping[str, Any],
    without: Sequence[str],
    overrides: Mapping[str, Any],
) -> Iterator[tuple[Source, Recipe, Active]]:
    """Open a recipe and its plugins; errors are those of the command line."""
    with alone(_one_call), errors():
        source = read_source(recipe, plugins, without, overrides)
        with announced(source.own):
            yield source, *resolve(source.tables, source.without, source.path)


def read_source(
    recipe: str | Path | Mapping[str, Any],
    plugins: Sequence[object] | Mapping[str, Any],
    without: Sequence[str],
    overrides: Mapping[str, Any],
) -> Source:
    """Read a recipe; merge overrides and plugins into its tables."""
    ensure_kind("recipe", recipe, str | os.PathLike | Mapping, "a recipe file, or a dict of tables")
    ensure_kind("plugins", plugins, Sequence | Mapping, "a list of objects, or a dict of tables")
    ensure_kind("without", without, Sequence, "a list of names of plugins")
    path = Path("recipe" if isinstance(recipe, Mapping) else recipe)
    if isinstance(plugins, Mapping):
        overrides, plugins = {**overrides, "plugins": plugins}, ()
    try:
        for tables in (recipe, overrides):
            check_depth(tables, TABLES)
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from error
    tables = _plain(recipe) if isinstance(recipe, Mapping) else read(path)
    tables = merged(tables, _plain(overrides))
    own = describe_plugins(plugins)
    add_objects(tables, own, path)
    return Source(tables, path, own, [without] if isinstance(without, str) else without)


def merged(tables: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return tables with values replaced or added; None removes a key."""
    result = dict(tables)
    for key, value in (overrides or {}).items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            below = result.get(key)
            result[key] = merged(below if isinstance(below, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def add_objects(tables: dict[str, Any], own: Mapping[str, OwnPlugin], path: Path) -> None:
    """Put plugin objects into the recipe's tables; refuse contradicting options."""
    plugins = tables.setdefault("plugins", {})
    if not isinstance(plugins, dict):
        return  # reported with the recipe's other mistakes
    for name, table in plugins.items():
        if hasattr(table, PLUGIN):
            raise RecipeError(f"{path}: plugins.{name}: pass an object as plugins=[...]")
    for name, plugin in own.items():
        table = plugins.get(name)
        differing = [
            f"plugins.{name}.{option}"
            for option, value in (table.items() if isinstance(table, dict) else ())
            if option != "enabled" and plugin.options.get(option) != value
        ]
        if differing:
            raise RecipeError(
                f"{path}: {', '.join(differing)}: the object in plugins=[...] has another value; "
                "remove one of them"
            )
        plugins[name] = plugin.instance


def _plain(value: Any) -> Any:
    """Copy tables; write paths and tuples as TOML would."""
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below) for below in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
