"""Create plugins from their tables in a recipe, and put them in order."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from pydantic import ValidationError

from ..base.errors import PluginError, RecipeError, choices, did_you_mean
from ..hooks import EVERY
from ..recipe.capabilities import ensure_complete
from ..recipe.explain import explain
from ..recipe.tables import short
from .contracts import SPECS, contract_of, hook_mark, is_stage
from .discover import FoundPlugin, load_class

STATE_HOOKS = ("state_dict", "load_state_dict")
"""Hooks that a plugin has both, or neither."""
GONE = {
    "evaluated": " any more: 'logged' gets the metrics of evaluations, which have 'eval_loss', and "
    "'add_metrics' adds to them"
}
"""Hooks of earlier versions -> what does their work."""


def create(name: str, options: Any, found: Mapping[str, FoundPlugin], path: str) -> Any:
    """Create a plugin from its options; None if it is switched off."""
    where = f"{path}: plugins.{name}"
    if name not in found:
        hint = did_you_mean(name, found)
        hint = hint or ", not installed, and not passed from Python (plugins=[...]);"
        raise RecipeError(
            f"{where}: unknown plugin{hint} there are: {', '.join(found) or 'none'}. "
            'docs/troubleshooting.md, "What you may look for", says what is not here'
        )
    if not isinstance(options, dict):
        raise RecipeError(f"{where}: given {short(options)}; write {{}} for defaults, or remove it")
    enabled = options.get("enabled", True)
    if not isinstance(enabled, bool):
        raise RecipeError(f"{where}.enabled: given {short(enabled)}; it should be true or false")
    if not enabled:
        return None
    try:
        cls = load_class(found[name])
        inspect_hooks(cls, name)
        return cls(**{key: value for key, value in options.items() if key != "enabled"})
    except OSError as error:
        error.add_note(f"raised by plugin '{name}', as it was created")
        raise
    except PluginError as error:
        raise RecipeError(f"{where}: {error}") from error
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RecipeError(explain(errors, cls, path, ("plugins", name))) from error
    except ValueError as error:
        # dataclasses refuse a default that is a list, a table or a set.
        message = re.match(r"mutable default <class '(\w+)'> for field (\w+)", str(error))
        if message is None:
            raise
        raise RecipeError(
            f"{where}: {message[2]}: write field(default_factory={message[1]}), from dataclasses"
        ) from error


def inspect_hooks(cls: type[Any], name: str) -> None:
    """Refuse mistakes that pluggy ignores: misspelt hooks, missing marks, wrong names."""
    _inspect_contract(cls)
    for attribute, function in inspect.getmembers_static(cls, inspect.isfunction):
        if mistake := _mistake(cls, attribute, function):
            raise PluginError(f"plugin '{name}': {attribute}(){mistake}")
    kept = [hook for hook in STATE_HOOKS if hook_mark(cls, hook)]
    if len(kept) == 1:
        [other] = {*STATE_HOOKS} - {*kept}
        raise PluginError(
            f"plugin '{name}' has {kept[0]}() and no {other}(): a resumed run would start without "
            f"its state; add {other}()"
        )


def _inspect_contract(cls: type[Any]) -> None:
    """Refuse names in @plugin(...) that are no options of the plugin, or no capabilities."""
    contract, where = contract_of(cls), f"class {cls.__name__}: @plugin("
    for argument in ("after", "before", "requires", "metrics", "watches"):
        names = getattr(contract, argument)
        if isinstance(names, str):
            raise PluginError(f'{where}{argument}="{names}"): write a list: ["{names}"]')
    if EVERY in (*contract.before, *contract.requires, *contract.conflicts):
        raise PluginError(f'{where}...): "{EVERY}" is for `after` only')
    try:
        ensure_complete(contract.provides)
    except PluginError as error:
        raise PluginError(f"{where}provides=...): {error}") from error
    options = ["enabled", *(field.name for field in dataclasses.fields(cls) if field.init)]
    named = {
        "affects_results": contract.affects_results,
        "affects_tokens": contract.affects_tokens or (),
        "watches": contract.watches,
        "provides": [option for option in contract.provides.values() if option is not None],
    }
    for argument, names in named.items():
        for name in names:
            if name not in options:
                raise PluginError(
                    f"{where}{argument}=...) names '{name}', which is no "
                    f"option{choices(name, options, 'options:')}"
                )


def _mistake(cls: type[Any], name: str, function: Callable[..., Any]) -> str:
    """Say what is wrong with a method as a hook, or nothing."""
    mark = hook_mark(cls, name)
    if mark is None:
        return " is named like a hook; mark it with @hookimpl" if name in SPECS else ""
    if name not in SPECS:
        return f" is no hook{GONE.get(name) or did_you_mean(name, SPECS)}"
    if mark["tryfirst"] or mark["trylast"] or mark["hookwrapper"]:
        return ": only wrapper=True is understood; order comes from @plugin(after=...)"
    if mark["wrapper"] and not is_stage(name):
        return f": '{name}' is a notice to every plugin; it cannot be wrapped"
    yields = inspect.isgeneratorfunction(function)
    if yields and not mark["wrapper"]:
        cure = "mark it @hookimpl(wrapper=True)" if is_stage(name) else "a notice has none"
        return f" has a yield: {cure}"
    if mark["wrapper"] and not yields:
        return " has no yield: remove wrapper=True, or yield once"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return ": a hook is a plain function; nothing awaits an async one"
    allowed = list(inspect.signature(SPECS[name]).parameters)
    for argument, parameter in inspect.signature(function).parameters.items():
        if argument not in allowed:
            hint = did_you_mean(argument, allowed) or ";"
            return f" has no argument '{argument}'{hint} allowed: {', '.join(allowed[1:])}"
        # pluggy would not pass it, and the default would replace the core's value.
        if parameter.default is not parameter.empty or parameter.kind is parameter.KEYWORD_ONLY:
            return f": write '{argument}' as a plain argument, with no default"
    return ""


def order(plugins: Mapping[str, Any]) -> list[str]:
    """Sort plugins by `after` and `before`; those that may come next, by name.

    after=["*"] comes after all others.
    """
    sorter = TopologicalSorter[str]()
    contracts = {name: contract_of(plugin) for name, plugin in sorted(plugins.items())}
    for name, contract in contracts.items():
        after = contract.after
        if EVERY in after:  # but those that come after all others too, or after this one
            after = [o for o, c in contracts.items() if not {EVERY, name} & {*c.after}]
        sorter.add(name, *(other for other in after if other in plugins))
        for other in contract.before:
            if other in plugins:
                sorter.add(other, name)
    try:
        sorter.prepare()
    except CycleError as error:
        circle = " before ".join(error.args[1])
        raise PluginError(
            f"plugins cannot be ordered, as their `after` and `before` say: {circle}; change one "
            "of these, or remove a plugin"
        ) from error
    ordered: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        ordered += ready
        sorter.done(*ready)
    return ordered
