"""Discovers the installed plugins: bundled ones, and those of other packages."""

import ast
import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from importlib.metadata import Distribution, entry_points
from pathlib import Path
from typing import Any, cast

from ..base.errors import PluginError
from ..hooks import PLUGIN, is_core

PLUGIN_PACKAGE = "plugsft.plugins"
GROUP = "plugsft"
BUNDLED = "bundled"
"""Origin of bundled plugins; that of others is their distribution's name and version."""


@dataclass(frozen=True)
class FoundPlugin:
    """An installed plugin, not imported yet."""

    name: str
    origin: str
    target: str
    """"module" or "module:Class"."""
    source: Path | Distribution

    @property
    def summary(self) -> str:
        """The first line of a file's docstring, or a package's own summary."""
        if isinstance(self.source, Path):
            text = ast.get_docstring(ast.parse(self.source.read_text(encoding="utf8"))) or ""
            return text.partition("\n")[0]
        # Not []: it raises for missing fields if a package has imported importlib_metadata.
        metadata: Any = self.source.metadata
        return metadata.get("Summary") or ""


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
    return found


def load_class(found: FoundPlugin) -> type[Any]:
    """Import a plugin and return its class."""
    module_name, _, class_name = found.target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise PluginError(
            f"plugin '{found.name}' needs the package '{package}': pip install {package}"
        ) from error
    except ImportError as error:
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
    return cast("type[Any]", own[0])
