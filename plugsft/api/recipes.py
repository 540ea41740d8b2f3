"""Recipes for `plugsft.api`: a file, or tables with own classes as plugins."""

import dataclasses
import inspect
import json
import marshal
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import tomli_w

from ..base.checksums import digest
from ..base.errors import PluginError, RecipeError
from ..base.limits import limited_depth
from ..hooks import PLUGIN
from ..recipe.read import read
from ..recipe.tables import Recipe
from ..registry.active import Active, options_of
from ..registry.create import inspect_hooks
from ..registry.discover import OWN, FoundPlugin, find
from ..registry.load import resolve
from .messages import PluginsLike, RecipeLike, alone, ensure_kind, errors


@dataclass(frozen=True)
class OwnPlugin:
    """A plugin object, and where other processes find its class."""

    instance: Any
    options: dict[str, Any]
    origin: str
    target: str
    """module:Class"""
    installed: bool
    """Whether a recipe finds the class by its name."""


def describe_plugins(plugins: Sequence[object]) -> dict[str, OwnPlugin]:
    """Return plugin objects by their names in recipes, with fresh state."""
    own: dict[str, OwnPlugin] = {}
    known = find()
    for plugin in plugins:
        _ensure_plugin(plugin)
        cls: Any = type(plugin)
        name, origin = _name(cls, known)
        if name in own:
            raise PluginError(f"plugins: two objects are named '{name}'; remove one")
        inspect_hooks(cls, name)
        target = f"{cls.__module__}:{cls.__qualname__}"
        own[name] = OwnPlugin(plugin, _options(plugin, name), origin, target, name in known)
        fields = [field.name for field in dataclasses.fields(cls) if field.init]
        cls.__init__(plugin, **{name: getattr(plugin, name) for name in fields})
    return own


@contextmanager
def announced(own: Mapping[str, OwnPlugin]) -> Iterator[None]:
    """Let this process and its children find the classes of plugin objects."""
    facts = {
        name: [plugin.origin, plugin.target] for name, plugin in own.items() if not plugin.installed
    }
    before = os.environ.get(OWN)
    os.environ[OWN] = json.dumps(facts)
    try:
        yield
    finally:
        del os.environ[OWN]
        if before is not None:
            os.environ[OWN] = before


def _ensure_plugin(plugin: object) -> None:
    """Refuse anything but an object of a plugin's class."""
    if isinstance(plugin, type):
        name = plugin.__name__
        raise PluginError(f"plugins: {name} is a class; pass an object of it: {name}(...)")
    if PLUGIN not in vars(type(plugin)):
        raise PluginError(
            f"plugins: {type(plugin).__name__} is no plugin; mark its class with @plugsft.plugin()"
        )


def _name(cls: type[Any], known: Mapping[str, FoundPlugin]) -> tuple[str, str]:
    """Return a plugin's name in recipes, and its origin for run.json."""
    for plugin in known.values():
        module, _, class_name = plugin.target.partition(":")
        if cls.__module__ == module and class_name in ("", cls.__name__):
            return plugin.name, plugin.origin
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()
    if name in known:
        raise PluginError(
            f"plugins: class {cls.__name__} would be named '{name}', as a plugin of "
            f"{known[name].origin} is; rename the class"
        )
    code = f", code {_code_digest(cls)[:8]}" if cls.__module__ == "__main__" else ""
    return name, f"class {cls.__qualname__} of {cls.__module__}{code}"


def _options(plugin: object, name: str) -> dict[str, Any]:
    """Return a plugin's options; refuse one that a recipe cannot hold."""
    try:
        options = options_of(plugin)
        tomli_w.dumps(options).encode()
        return options
    except (TypeError, ValueError) as error:  # of pydantic, of TOML
        raise PluginError(
            f"plugins.{name}: an option is no plain value ({error}); an option is a number, a "
            "text, true or false, or a list or table of these. Declare other values with state()"
        ) from error


def _code_digest(cls: type[Any]) -> str:
    """Return a checksum of a class's methods; a notebook has no file."""
    functions = (value for value in vars(cls).values() if isinstance(value, FunctionType))
    return digest({function.__name__: _text(function) for function in functions})


def _text(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except Exception:  # whatever inspect meets where the file has changed, or is none
        return marshal.dumps(function.__code__).hex()


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
    recipe: RecipeLike,
    plugins: PluginsLike,
    without: Sequence[str],
    overrides: Mapping[str, Any],
) -> Iterator[tuple[Source, Recipe, Active]]:
    """Open a recipe and its plugins; errors are those of the command line."""
    with alone(_one_call), errors():
        source = read_source(recipe, plugins, without, overrides)
        with announced(source.own):
            yield source, *resolve(source.tables, source.without, source.path)


def read_source(
    recipe: RecipeLike,
    plugins: PluginsLike,
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
        with limited_depth():
            given, overrides = _plain(recipe), _plain(overrides)
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from error
    tables = merged(given if isinstance(recipe, Mapping) else read(path), overrides)
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
