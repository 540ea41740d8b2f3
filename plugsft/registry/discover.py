"""Discovers the installed plugins: bundled ones, and those of other packages."""

import importlib
import importlib.util
import inspect
import json
import os
from dataclasses import dataclass
from importlib.metadata import Distribution, entry_points
from pathlib import Path
from typing import Any

from ..base.errors import PluginError
from ..hooks import PLUGIN, is_core

PLUGIN_PACKAGE = "plugsft.plugins"
GROUP = "plugsft"
BUNDLED = "bundled"
"""Origin of bundled plugins; that of others is their distribution's name and version."""


OWN = "PLUGSFT_OWN_PLUGINS"
"""Variable with the plugin objects of a call from Python: name -> origin, target."""


@dataclass(frozen=True)
class FoundPlugin:
    """An installed plugin, not imported yet."""

    name: str
    origin: str
    target: str
    """"module" or "module:Class"."""
    source: Path | Distribution


def find() -> dict[str, FoundPlugin]:
    """Return every installed plugin by name, without importing any."""
    found = {}
    folder = Path(importlib.import_module(PLUGIN_PACKAGE).__path__[0])
    # A plugin is a file, or a folder whose __init__.py holds its class.
    files = {path.stem: path for path in folder.glob("[!_]*.py")}
    files |= {path.parent.name: path for path in folder.glob("[!_]*/__init__.py")}
    for name, path in sorted(files.items()):
        found[name] = FoundPlugin(name, BUNDLED, f"{PLUGIN_PACKAGE}.{name}", path)
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        other, dist = found.get(point.name), point.dist
        assert dist is not None, "entry points belong to distributions"
        origin = f"{dist.name} {dist.version}"
        if is_core(point.name):
            raise PluginError(f"{origin}: a plugin cannot be named '{point.name}'. Uninstall it.")
        if other is not None and other.target != point.value:
            raise PluginError(
                f"two plugins are named '{point.name}': {other.origin} and {origin}. Uninstall one."
            )
        found[point.name] = FoundPlugin(point.name, origin, point.value, dist)
    try:
        for name, (origin, target) in json.loads(os.environ.get(OWN, "{}")).items():
            found[name] = FoundPlugin(name, origin, target, Path(os.devnull))
    except (AttributeError, TypeError, ValueError) as error:
        raise PluginError(
            f"the environment has {OWN}, which plugsft sets itself for calls from Python: unset it"
        ) from error
    return found


def ensure_importable(name: str, target: str) -> None:
    """Refuse a notebook's class, which no other process can import."""
    module, _, class_name = target.partition(":")
    if module == "__main__":
        raise PluginError(
            f"plugin '{name}': another process needs its class {class_name}, and cannot import it "
            "from a notebook or script: move the class to a module, and import it from there"
        )


def load_class(found: FoundPlugin) -> type[Any]:
    """Import a plugin and return its class."""
    ensure_importable(found.name, found.target)
    module_name, _, class_name = found.target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise PluginError(
            f"plugin '{found.name}' needs the package '{package}': pip install {package}"
        ) from error
    except (ImportError, SyntaxError) as error:
        raise PluginError(f"plugin '{found.name}' cannot be imported: {error}") from error
    own = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value) and PLUGIN in vars(value) and class_name in ("", name)
    ]
    if len(own) != 1:
        raise PluginError(
            f"plugin '{found.name}': {found.target} holds {len(own)} classes marked @plugin, "
            "and needs exactly one"
        )
    return own[0]
