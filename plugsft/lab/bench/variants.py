"""Who takes part in a bench: a recipe's plugins, each alone, each left out, none, and all."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...base.errors import RecipeError, did_you_mean
from ...hooks import DATA
from ...registry.active import Active, contract_of
from ...registry.contracts import SPECS, hook_mark
from ..trials.runner import ELSEWHERE

BASELINE, ALL = "baseline", "all on"
SILENT = ("check", "verdict", "record")
"""Notices that no step waits for."""
READS, LEARNS = "it reads the rows", "it says what is learned"
BOTH = "it changes rows and works in steps: bench a recipe without it"


@dataclass
class Lineup:
    """The plugins that a recipe can do without, and the contenders: name -> who of them is on."""

    optional: list[str]
    kept: dict[str, str]
    """Plugin -> why it is always on."""
    requires: dict[str, list[str]]
    """Of each optional plugin, those it cannot be without: itself, and what it requires."""
    steppers: list[str]
    """Those that could touch a step; no step of the others' differs, by construction."""
    preparers: list[str]
    """Those that have a hand in preparing the data."""
    measured: list[str]
    contenders: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.contenders = {BASELINE: [], ALL: self.optional}
        for name in self.measured:
            self.contenders[alone(name)] = self.requires[name]
        for name in self.measured:
            self.contenders[all_but(name)] = self.without([name])

    def without(self, names: Sequence[str]) -> list[str]:
        """Return the optional plugins but some, and those that require one of these."""
        return [one for one in self.optional if not {*names} & {*self.requires[one]}]

    def trials_of(self, some: Sequence[str]) -> dict[str, list[str]]:
        """Return what is to be tried: which of some plugins are on -> what is left out for that.

        Contenders that differ in others only are one trial.
        """
        found = {}
        for on in self.contenders.values():
            off = [name for name in some if name not in on]
            stay = self.without(off)
            found[key(on, some)] = [name for name in self.optional if name not in stay]
        return found


def key(on: Sequence[str], some: Sequence[str]) -> str:
    """Name a trial by those of some plugins that are on."""
    return " ".join(name for name in some if name in on) or "none"


def alone(plugin: str) -> str:
    """Name the contender with one plugin, and what that one requires."""
    return f"{plugin} alone"


def all_but(plugin: str) -> str:
    """Name the contender with every plugin but one, and those that require that one."""
    return f"all but {plugin}"


def line_up(active: Active, keep: Sequence[str], only: Sequence[str]) -> Lineup:
    """Choose what is measured: what a recipe can do without, or some of that."""
    there = [name for name in active.plugins if name not in ELSEWHERE]
    for option, names in (("--keep", keep), ("--only", only)):
        for name in names:
            if name not in there:
                hint = did_you_mean(name, there) or (
                    f"; it has {', '.join(there) or 'none'}: add [plugins.{name}]"
                )
                raise RecipeError(f"{option} {name}: the recipe has no such plugin on{hint}")
    kept = {name: why for name in there if (why := _needed(active, name))}
    kept |= dict.fromkeys(keep, "--keep")
    for name in [*kept]:
        for other in _with_required(active, name, there):
            kept.setdefault(other, f"{name} requires it")
    optional = [name for name in there if name not in kept]
    if wrong := [f"--only {name}: it is always on: {kept[name]}" for name in only if name in kept]:
        raise RecipeError(wrong)
    if not optional:
        raise RecipeError("plugins: there is none to measure; add a table [plugins.NAME]")
    return Lineup(
        optional,
        kept,
        {name: _with_required(active, name, optional) for name in optional},
        steppers=[name for name in optional if _in_steps(active, name)],
        preparers=[name for name in optional if active.implements(name, DATA)],
        measured=[name for name in optional if name in only] or optional,
    )


def _needed(active: Active, name: str) -> str:
    """Say why a recipe cannot do without a plugin, if so."""
    marks = {hook: hook_mark(type(active.plugins[name]), hook) for hook in ("render", "step")}
    answers = [hook for hook, mark in marks.items() if mark and not mark["wrapper"]]
    if answers:
        return READS if "render" in answers else LEARNS
    return BOTH if marks["render"] and _in_steps(active, name) else ""


def _in_steps(active: Active, name: str) -> bool:
    """Tell whether a plugin could touch a step."""
    return active.implements(name, [hook for hook in SPECS if hook not in (*DATA, *SILENT)])


def _with_required(active: Active, name: str, among: Sequence[str]) -> list[str]:
    """Return a plugin with those of some others that it requires, and those these require."""
    found = [name]
    for one in found:
        requires = contract_of(active.plugins[one]).requires
        found += [other for other in requires if other in among and other not in found]
    return [other for other in among if other in found]
