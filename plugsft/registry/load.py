"""Read a recipe and create its plugins."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import RecipeError, choices
from ..hooks import PLUGIN
from ..recipe.capabilities import SHARED, SUGGESTED
from ..recipe.read import read, validate
from ..recipe.tables import COLUMNS, Recipe
from .active import Active, options_of
from .contracts import SPECS, contract_of, hook_mark, is_stage
from .create import create, order
from .discover import find
from .metrics import declared_metrics


def load(
    path: str | Path, overrides: Sequence[str] = (), without: Sequence[str] = ()
) -> tuple[Recipe, Active]:
    """Read a recipe and create its plugins; report all mistakes at once."""
    return resolve(read(path, overrides), without, path)


def resolve(
    raw: dict[str, Any], without: Sequence[str] = (), path: str | Path = "recipe"
) -> tuple[Recipe, Active]:
    """Create a recipe, which then has every option, and its plugins."""
    known = find()
    plugins = raw.get("plugins", {})
    tables = dict(plugins) if isinstance(plugins, dict) else {}
    problems: list[str] = []
    for name in without:
        if tables.pop(name, None) is None:
            hint = choices(name, tables, "it has")
            problems.append(f"--without {name}: the recipe has no [plugins.{name}]{hint}")
    created = {}
    for name, options in tables.items():
        try:
            # From Python, a plugin may be an object.
            plugin = (
                options if hasattr(options, PLUGIN) else create(name, options, known, str(path))
            )
            if plugin is not None:
                created[name] = plugin
        except RecipeError as error:
            problems += error.problems
    if isinstance(plugins, dict):
        plugins = {name: options_of(plugin) for name, plugin in created.items()}
    recipe, wrong = validate({**raw, "plugins": plugins}, path)
    columns = {**recipe.data.columns} if recipe else {}
    for source in recipe.data.sources or () if recipe else ():
        columns |= source.columns
    problems = [*wrong, *problems]
    problems += [f"{path}: {line}" for line in _conflicts(created, tables, columns)]
    if problems or recipe is None:
        raise RecipeError(problems)
    recipe = recipe.with_provided(
        [
            (capability, name, option)
            for name in sorted(created)
            for capability, option in contract_of(created[name]).provides.items()
        ]
    )
    for capability in sorted({*SUGGESTED} - SHARED):
        names = [provider.plugin for provider in recipe.providers(capability)]
        if len(names) > 1:
            problems.append(
                f"{path}: plugins.{names[1]}: provides {capability}, and so does '{names[0]}': "
                "remove one, or switch it off with --without"
            )
    if problems:
        raise RecipeError(problems)
    active = Active({name: created[name] for name in order(created)}, known)
    active.declared_metrics = declared_metrics(active.plugins, recipe, path)
    return recipe, active


def _conflicts(
    created: Mapping[str, Any], tables: Mapping[str, Any], columns: Mapping[str, str]
) -> Iterator[str]:
    """Yield conflicts between active plugins, and unknown names in data.columns."""
    replaced: dict[str, str] = {}
    for name, plugin in sorted(created.items()):
        contract = contract_of(plugin)
        for other in contract.requires:
            if other not in created:
                off = " (it is switched off)" if other in tables else ""
                yield f"plugins.{name}: requires '{other}'{off}: add [plugins.{other}]"
        for other, reason in contract.conflicts.items():
            if other in created:
                yield f"plugins.{name}: cannot be used with '{other}': {reason}. Remove one."
        for hook in SPECS:
            mark = hook_mark(type(plugin), hook)
            if mark and not mark["wrapper"] and is_stage(hook):
                first = replaced.setdefault(hook, name)
                if first != name:
                    yield (
                        f"plugins.{name}: answers '{hook}', and so does '{first}': "
                        "remove one, or switch it off with --without"
                    )
                    break
    if not any(hook_mark(type(plugin), "render") for plugin in created.values()):
        for name in sorted({*columns} - {*COLUMNS}):
            yield f"data.columns: unknown name '{name}'{choices(name, COLUMNS, 'known are')}"
