"""Plugin objects of a call from Python."""

import dataclasses
import inspect
import json
import marshal
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import tomli_w

from ..base.checksums import digest
from ..base.errors import PluginError
from ..hooks import PLUGIN
from ..registry.active import options_of
from ..registry.contracts import inspect_hooks
from ..registry.discover import OWN, FoundPlugin, find


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
    except (OSError, TypeError):
        return marshal.dumps(function.__code__).hex()
