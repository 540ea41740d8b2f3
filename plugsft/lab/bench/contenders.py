"""The contenders of a bench: no plugin, all, each one alone, and all but each."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...base.errors import RecipeError, did_you_mean
from ...hooks import DATA
from ...registry.active import Active
from ...registry.contracts import SPECS, contract_of, hook_mark
from ..trials.runner import LEFT_OUT_ALWAYS

BASELINE, ALL = "baseline", "all on"
SILENT = ("check", "summary", "record")
"""Notices outside of steps."""
READS, LEARNS = "it renders the rows", "it computes the loss"
BOTH = "it changes both rows and steps; bench a recipe without it"


@dataclass
class Contenders:
    """The optional plugins of a recipe, and the contenders: name -> active optional plugins."""

    optional: list[str]
    kept: dict[str, str]
    """Plugin -> reason why it is always on."""
    requires: dict[str, list[str]]
    """Optional plugin -> itself and the plugins that it requires."""
    steppers: list[str]
    """Plugins that can affect a step."""
    preparers: list[str]
    """Plugins that can affect the preparation of data."""
    measured: list[str]
    contenders: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.contenders = {BASELINE: [], ALL: self.optional}
        for name in self.measured:
            self.contenders[alone(name)] = self.requires[name]
        for name in self.measured:
            self.contenders[name_without(name)] = self.without([name])

    def without(self, names: Sequence[str]) -> list[str]:
        """Return the optional plugins without `names`, and without those that require them."""
        return [name for name in self.optional if not {*names} & {*self.requires[name]}]

    def trials_for(self, plugins: Sequence[str]) -> dict[str, list[str]]:
        """Return the trials: key of the active plugins among `plugins` -> plugins left out.

        Contenders that differ only in other plugins share a trial.
        """
        trials = {}
        for on in self.contenders.values():
            stay = self.without([name for name in plugins if name not in on])
            trials[key(on, plugins)] = [name for name in self.optional if name not in stay]
        return trials


def key(on: Sequence[str], plugins: Sequence[str]) -> str:
    """Name a trial by the active plugins among `plugins`."""
    return " ".join(name for name in plugins if name in on) or "none"


def alone(plugin: str) -> str:
    """Name the contender with one plugin and its requirements."""
    return f"{plugin} alone"


def name_without(plugin: str) -> str:
    """Name the contender without one plugin and those that require it."""
    return f"all but {plugin}"


def choose_contenders(active: Active, keep: Sequence[str], only: Sequence[str]) -> Contenders:
    """Choose the optional plugins to measure, and the contenders."""
    left_out = {*LEFT_OUT_ALWAYS}
    available = [
        name
        for name, plugin in active.plugins.items()
        if not left_out & {*contract_of(plugin).provides}
    ]
    for option, names in (("--keep", keep), ("--only", only)):
        for name in names:
            if name not in available:
                hint = did_you_mean(name, available) or (
                    f"; it has {', '.join(available) or 'none'}: add [plugins.{name}]"
                )
                raise RecipeError(f"{option} {name}: the recipe has no such active plugin{hint}")
    kept = {name: why for name in available if (why := _needed(active, name))}
    kept |= dict.fromkeys(keep, "--keep")
    for name in [*kept]:
        for other in _with_required(active, name, available):
            kept.setdefault(other, f"{name} requires it")
    optional = [name for name in available if name not in kept]
    if wrong := [f"--only {name}: it is always on: {kept[name]}" for name in only if name in kept]:
        raise RecipeError(wrong)
    if not optional:
        raise RecipeError("plugins: none to measure; add a table [plugins.NAME]")
    return Contenders(
        optional,
        kept,
        {name: _with_required(active, name, optional) for name in optional},
        steppers=[name for name in optional if _in_steps(active, name)],
        preparers=[name for name in optional if active.implements(name, DATA)],
        measured=[name for name in optional if name in only] or optional,
    )


def _needed(active: Active, name: str) -> str:
    """Return why a plugin must stay on, or an empty string."""
    marks = {hook: hook_mark(type(active.plugins[name]), hook) for hook in ("render", "step")}
    answers = [hook for hook, mark in marks.items() if mark and not mark["wrapper"]]
    if answers:
        return READS if "render" in answers else LEARNS
    return BOTH if marks["render"] and _in_steps(active, name) else ""


def _in_steps(active: Active, name: str) -> bool:
    """Tell whether a plugin can affect a step."""
    return active.implements(name, [hook for hook in SPECS if hook not in (*DATA, *SILENT)])


def _with_required(active: Active, name: str, among: Sequence[str]) -> list[str]:
    """Return the plugins of `among` that a plugin requires, directly or not, and itself."""
    required = [name]
    for plugin in required:
        requires = contract_of(active.plugins[plugin]).requires
        required += [other for other in requires if other in among and other not in required]
    return [other for other in among if other in required]
