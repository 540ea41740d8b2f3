"""Plugins, a recipe with its defaults, and the plugins that answer each hook."""

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.console import print_table, say
from ..hooks import CORE
from ..output.folder import find_run
from ..recipe.parse import resolved
from ..registry.active import options_of
from ..registry.discover import FoundPlugin, find
from ..registry.load import load

CORE_NOTICES = ("logged",)
"""The notices that the core implements; it answers every stage. Listed here to avoid torch."""


def list_plugins() -> None:
    """Print every installed plugin, importing none."""
    plugins = find()
    if not plugins:
        say("no plugins; `plugsft new-plugin NAME` writes a skeleton")
        return
    print_table([(name, plugin.origin, summary_of(plugin)) for name, plugin in plugins.items()])


def summary_of(plugin: FoundPlugin) -> str:
    """Return a plugin's first line of documentation, or its package's summary."""
    if isinstance(plugin.source, Path):
        text = ast.get_docstring(ast.parse(plugin.source.read_text(encoding="utf8"))) or ""
        return text.partition("\n")[0]
    # Not []: it raises for missing fields if a package has imported importlib_metadata.
    metadata: Any = plugin.source.metadata
    return metadata.get("Summary") or ""


def show_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Print a recipe as TOML with every default filled in."""
    recipe, _ = load(path, overrides)
    say(resolved(recipe).rstrip())


def list_hooks(path: Path, overrides: Sequence[str], without: Sequence[str]) -> None:
    """Print who answers and who wraps each hook, then each plugin's options and summary."""
    recipe, active = load(path, overrides, without)
    active.attach()
    hooks = []
    for hook, is_stage, answers, wrappers in active.describe():
        names = [*answers, CORE] if is_stage or hook in CORE_NOTICES else answers
        text = (", else " if is_stage else ", ").join(names) or "nobody"
        wrapped = f", wrapped by {', then '.join(wrappers)}" if wrappers else ""
        hooks.append((hook, "stage" if is_stage else "notice", text + wrapped))
    print_table(hooks)
    last = {
        plugin.name: f"{plugin.summary} (last run)" for plugin in find_run(recipe.folder).plugins
    }
    for name, plugin in active.plugins.items():
        options = options_of(plugin)
        shown = ", ".join(
            f"{key} = {json.dumps(value, default=str)}" for key, value in options.items()
        )
        say(f"\n{name}  {active.found[name].origin}")
        say(f"  options  {shown or 'none'}")
        say(f"  summary  {last.get(name, 'not run yet')}")
