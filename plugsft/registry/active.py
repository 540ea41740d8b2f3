"""A recipe's active plugins: configured, checked, ordered, and called through typed hooks."""

import os
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, cast

import pluggy
from pydantic import TypeAdapter

from ..base.checksums import digest, file_digest
from ..base.console import print_error, say
from ..base.errors import RecipeError
from ..base.machine import Machine, not_installed
from ..hooks import CORE, Hooks
from ..recipe.parse import fields
from ..recipe.tables import Recipe
from .contracts import (
    CountOf,
    contract_of,
    guarded,
    hook_mark,
    numbers_of,
)
from .discover import BUNDLED, FoundPlugin, find, load_class


class Active:
    """The core's answers and the plugins of one recipe, in order."""

    def __init__(self, plugins: Mapping[str, Any], found: Mapping[str, FoundPlugin]) -> None:
        self.plugins = dict(plugins)
        self.found = found
        self.declared_metrics: dict[str, list[str]] = {}
        """Plugin -> the names of its metrics."""
        self.guard: object = None
        """Wraps stages, to look at what plugins give."""
        self._manager = pluggy.PluginManager("plugsft")
        self._manager.add_hookspecs(Hooks)
        if os.environ.get("PLUGSFT_TRACE") == "1":
            # Without arguments: a line may print a model.
            self._manager.trace.root.setwriter(lambda text: print_error(text.split("\n")[0][:100]))
            self._manager.enable_tracing()
        # Typed as the specs, so that mypy checks arguments and results of each call.
        self.hooks = cast(Hooks, self._manager.hook)

    def attach(self, *answers: object) -> "Active":
        """Register the core's answers, then the plugins in their order, then the guard.

        pluggy calls the last one first: a plugin answers before the core, and the last wrapper is
        outermost. So a plugin with after=["lora"] wraps `lora`.
        """
        for number, core in enumerate(answers):
            name = f"{CORE}{number or ''}"
            self._manager.register(guarded(core, name), name)
        for name, plugin in self.plugins.items():
            self._manager.register(guarded(plugin, name), name)
        self._manager.register(self.guard, f"{CORE}{len(answers)}")
        return self

    def notify(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Exception]]:
        """Call a notice's plugins in the declared order; yield each that fails, with its error."""
        for impl in self._impls(hook):
            # A plugin that edits its metrics must not change those of others.
            own = {n: dict(value) if n == "metrics" else value for n, value in arguments.items()}
            try:
                impl.function(*(own[name] for name in impl.argnames))
            except Exception as error:
                yield impl.plugin_name, error

    def metrics(self, run: Any) -> dict[str | CountOf, Any]:
        """Return this rank's sums of the plugins' metrics, and their counts, by name."""
        sums: dict[str | CountOf, Any] = {}
        for name, measured in self._results("add_metrics", run=run).items():
            for metric, value in (measured or {}).items():
                numbers = numbers_of(name, metric, value, self.declared_metrics[name])
                sums.update(zip((metric, CountOf(metric)), numbers, strict=False))
        return sums

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        """Return what each plugin keeps in checkpoints."""
        return self._results("state_dict")

    def load_state_dicts(self, states: Mapping[str, Any]) -> None:
        """Give each plugin what it kept in a checkpoint."""
        impls = {impl.plugin_name: impl.function for impl in self._impls("load_state_dict")}
        for name, state in states.items():
            if name in impls:
                impls[name](state)
            else:
                say(f"warning: the checkpoint holds state of plugin '{name}', which is off")
        for name in impls.keys() - states.keys():
            say(f"warning: the checkpoint holds no state of plugin '{name}'; it starts without")

    def answering(self, hook: str) -> list[str]:
        """Name the core and the plugins that answer a hook, the first one first."""
        return [impl.plugin_name for impl in reversed(self._impls(hook)) if not impl.wrapper]

    def summaries(self, hooks: Sequence[str] | None = None) -> dict[str, str]:
        """Return each plugin's `summary`; only of plugins with one of these hooks, if any."""
        names = [name for name in self.plugins if hooks is None or self.implements(name, hooks)]
        texts = self._results("summary", names)
        return {name: str(texts.get(name) or "active") for name in names}

    def implements(self, name: str, hooks: Sequence[str]) -> bool:
        """Tell whether a plugin implements one of these hooks."""
        return any(hook_mark(type(self.plugins[name]), hook) for hook in hooks)

    def having(self, hook: str) -> list[str]:
        """Name the plugins that answer or wrap a hook."""
        return [name for name in self.plugins if self.implements(name, [hook])]

    def options_affecting_results(self) -> dict[str, Any]:
        """Return the options that affect results and differ from their defaults.

        A plugin that is off has the defaults, and is not enabled.
        """
        changed = {}
        for name, plugin in self.plugins.items():
            options = options_of(plugin) | {"enabled": True}
            for option in contract_of(plugin).affects_results:
                field = type(plugin).__pydantic_fields__.get(option)  # None: "enabled"
                default = field and field.get_default(call_default_factory=True)
                if options.get(option) != default:
                    changed[f"plugins.{name}.{option}"] = options[option]
        return changed

    def compared(self) -> dict[str, str]:
        """Describe options and code of the plugins, to compare ranks."""
        options = self.options_affecting_results().items()
        code = {f"the code of plugin {name}": self.source_digest(name) for name in self.plugins}
        return {key: repr(value) for key, value in options} | code

    def is_bundled(self, name: str) -> bool:
        """Tell whether a plugin comes with plugsft."""
        return self.found[name].origin == BUNDLED

    def source_digest(self, name: str) -> str:
        """Return a checksum of a plugin's file, or of its package's version and files."""
        module = type(self.plugins[name]).__module__
        package = module if self.is_bundled(name) else module.partition(".")[0]
        folders = getattr(sys.modules[package], "__path__", ())
        files = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
        # A notebook has no file, and a checksum in its origin.
        files = files or [Path(getattr(sys.modules[module], "__file__", os.devnull))]
        # Only file names: the folder may differ between machines.
        names = [(path.name, file_digest(path)) for path in files]
        return digest({"origin": self.found[name].origin, "files": names})

    def _results(
        self, hook: str, names: Container[str] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Call a notice: plugin -> its result."""
        impls = [each for each in self._impls(hook) if names is None or each.plugin_name in names]
        return {
            impl.plugin_name: impl.function(*(arguments[name] for name in impl.argnames))
            for impl in impls
        }

    def _impls(self, hook: str) -> list[pluggy.HookImpl]:
        """List a hook's implementations as registered: the core, then plugins in their order."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        return caller.get_hookimpls()


def rebuild(plugins: Mapping[str, dict[str, Any]]) -> Active:
    """Create plugins again in another process, from options that were checked, in their order."""
    found = find()
    made = {name: load_class(found[name])(**options) for name, options in plugins.items()}
    return Active(made, found)


def options_of(plugin: Any) -> dict[str, Any]:
    """Return a plugin's options without those that are None, which TOML cannot express."""
    names = {name for name, _ in fields(type(plugin))}
    # Convert to plain values: an option may be a table.
    values: dict[str, Any] = TypeAdapter(type(plugin)).dump_python(
        plugin, mode="json", include=names, exclude_none=True
    )
    return values


def check(
    active: Active, recipe: Recipe, machine: Machine, hooks: Sequence[str] | None = None
) -> None:
    """Call `check` of all plugins, or those with one of these hooks; raise all errors at once."""
    problems: list[str] = []
    for impl in active._impls("check"):
        if hooks is not None and not active.implements(impl.plugin_name, hooks):
            continue
        given, where = {"recipe": recipe, "machine": machine}, f"plugins.{impl.plugin_name}"
        needs = contract_of(active.plugins[impl.plugin_name]).needs
        try:
            if missing := [*filter(None, starmap(not_installed, needs.items()))]:
                raise RecipeError(missing)
            impl.function(*(given[name] for name in impl.argnames))
        except RecipeError as error:
            problems += [
                line if line.startswith(where) else f"{where}: {line}" for line in error.problems
            ]
    if problems:
        raise RecipeError(problems)
