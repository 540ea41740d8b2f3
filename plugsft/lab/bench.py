"""`plugsft bench`: the costs and gains of each plugin of a recipe, measured on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..base.atomic import write_text
from ..base.console import format_count, progress, say
from ..base.errors import PlugsftError, RecipeError, Stopped, choices
from ..base.for_commands import print_table
from ..hooks import DATA
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..registry.contracts import SPECS, contract_of, hook_mark
from .timing import (
    ALL,
    BASELINE,
    Bench,
    Figures,
    alone,
    as_json,
    head,
    in_rounds,
    name_without,
)
from .trials import LEFT_OUT_ALWAYS, Trial, TrialRunner, refuse_ranks, trials

JSON = "bench.json"
SILENT = ("check", "summary", "record")
"""Notices outside of steps."""
METRICS = {
    "seconds": "step_seconds",
    "tokens": "tokens",
    "trained": "trained_tokens",
    "loss": "loss",
    "grad_norm": "grad_norm",
}
"""Name in the report -> metric of a step."""
READS, LEARNS = "it renders the rows", "it computes the loss"
BOTH = "it changes both rows and steps; bench a recipe without it"
NO_STEP = "it affects no step"


@dataclass
class Contenders:
    """The optional plugins of a recipe, and the contenders made of them."""

    optional: list[str]
    kept: dict[str, str]
    """Plugin -> reason why it is always on."""
    measured: list[str]
    contenders: dict[str, list[str]]
    """Name -> active optional plugins."""

    def trials(self) -> dict[str, list[str]]:
        """The trials of all contenders: key of the active plugins -> plugins left out."""
        return {
            key(on): [name for name in self.optional if name not in on]
            for on in self.contenders.values()
        }


def key(on: Sequence[str]) -> str:
    """Name a trial by its active plugins; contenders with the same plugins share it."""
    return " ".join(on) or "none"


def choose_contenders(active: Active, only: Sequence[str]) -> Contenders:
    """Choose the optional plugins to measure, and the contenders."""
    left_out, plugins = {*LEFT_OUT_ALWAYS}, active.plugins.items()
    available = [name for name, one in plugins if not left_out & {*contract_of(one).provides}]
    for name in only:
        if name not in available:
            hint = f"{choices(name, available, 'it has')}; add [plugins.{name}]"
            raise RecipeError(f"--only {name}: the recipe has no such active plugin{hint}")
    kept = {name: why for name in available if (why := _needed(active, name))}
    for name in [*kept]:
        for other in _with_required(active, name, available):
            kept.setdefault(other, f"{name} requires it")
    optional = [name for name in available if name not in kept]
    if wrong := [f"--only {name}: it is always on: {kept[name]}" for name in only if name in kept]:
        raise RecipeError(wrong)
    if not optional:
        raise RecipeError("plugins: none to measure; add a table [plugins.NAME]")
    measured = [name for name in optional if name in only] or optional
    contenders: dict[str, list[str]] = {BASELINE: [], ALL: optional}
    requires = {name: _with_required(active, name, optional) for name in optional}
    for name in measured:
        contenders[alone(name)] = requires[name]
    for name in measured:
        rest = [other for other in optional if name not in requires[other]]
        contenders[name_without(name)] = rest
    return Contenders(optional, kept, measured, contenders)


def _needed(active: Active, name: str) -> str:
    """Say why a plugin must stay on; an empty string if it need not."""
    render, step = (hook_mark(type(active.plugins[name]), hook) for hook in ("render", "step"))
    for mark, reason in ((render, READS), (step, LEARNS)):
        if mark and not mark["wrapper"]:
            return reason
    if not active.implements(name, [hook for hook in SPECS if hook not in (*DATA, *SILENT)]):
        return NO_STEP
    return BOTH if render else ""


def _with_required(active: Active, name: str, among: Sequence[str]) -> list[str]:
    """The plugins of `among` that a plugin requires, directly or not, and itself."""
    required = [name]
    for plugin in required:
        requires = contract_of(active.plugins[plugin]).requires
        required += [other for other in requires if other in among and other not in required]
    return [other for other in among if other in required]


def bench(
    recipe: Recipe,
    active: Active,
    path: Path,
    settings: dict[str, Any],
    only: Sequence[str],
    overwrite: bool,
) -> None:
    """Measure each plugin alone and left out, in fresh processes, in rounds.

    `settings` has the options that figures depend on: rounds, steps, warmup and launch.
    """
    refuse_ranks("bench")
    contenders = choose_contenders(active, only)
    file = Path(f"{recipe.folder}-bench") / JSON
    report = {
        **head(),
        "status": "running",
        "name": path.stem,
        "recipe": recipe.model_dump(exclude_none=True, exclude={"output"}),
        "settings": settings,
        "measured": contenders.measured,
        "kept": contenders.kept,
        "contenders": {
            name: {"on": on, "rounds": key(on)} for name, on in contenders.contenders.items()
        },
        "rounds": [],
    }
    running = BenchRun(contenders, file, report)
    if file.exists() and '"contenders": {' not in file.read_text(encoding="utf8", errors="replace"):
        raise RecipeError(
            f"{file} was not written by plugsft bench; give another folder (output=...)"
        )
    if file.exists() and not overwrite:
        raise RecipeError(f"{file} exists; add --overwrite, or give another output=...")
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, reason in contenders.kept.items():
        say(f"always on: {name}: {reason}")
    try:
        examples = (running.steps + 1) * recipe.train.batch_size
        with trials(recipe, active, settings["launch"], examples) as runner:
            running.measure(runner)
    except KeyboardInterrupt:
        running.write("stopped")
        raise Stopped(f"stopped; complete rounds are in {file}") from None
    running.write("complete")
    print_table(Bench(running.report).table())
    say(f"figures: {file}")


@dataclass
class BenchRun:
    """A bench while it runs."""

    contenders: Contenders
    file: Path
    report: dict[str, Any]
    """Written after each round."""

    @property
    def steps(self) -> int:
        """Steps of a trial."""
        return int(self.report["settings"]["warmup"] + self.report["settings"]["steps"])

    def measure(self, runner: TrialRunner) -> None:
        """Run trials in rounds; write the report after each. What fails is not repeated."""
        trials, rounds = self.contenders.trials(), self.report["settings"]["rounds"]
        say(f"{rounds} rounds of {format_count(len(trials), 'trial')}")
        failed = set[str]()
        with progress("bench", rounds * len(trials), "trials") as advance:

            def run(name: str) -> Figures | None:
                if name in failed:
                    return None
                left_out = trials[name]
                figures = read_figures(runner.run({}, self.steps, left_out))
                advance(1, name)
                if figures["error"]:
                    error = figures["error"].splitlines()[-1]
                    if name == "none":
                        raise PlugsftError(
                            f"the baseline, without {', '.join(left_out)}, does not run: {error}; "
                            "add it to `requires` of a plugin that stays, or bench without it"
                        )
                    failed.add(name)
                    say(f"with {name}: failed: {error}")
                return figures

            for results in in_rounds(rounds, {name: partial(run, name) for name in trials}):
                self.report["rounds"].append(
                    {name: value for name, value in results.items() if value}
                )
                self.write("running")

    def write(self, status: str) -> None:
        """Write the figures so far."""
        self.report["status"] = status
        if self.report["rounds"]:
            results = Bench(self.report).results()
            self.report["summary"] = {result.plugin: result.summary() for result in results}
            write_text(self.file, as_json(self.report))


def read_figures(trial: Trial) -> Figures:
    """What the report holds of a trial."""
    figures: Figures = {"whole": trial.seconds, "error": trial.error}
    if trial.error:
        return figures
    figures |= {name: trial.of(metric) for name, metric in METRICS.items()}
    figures["exact"] = not any("float16" in dtype for dtype in trial.run["dtypes"].values())
    for device in ("host", "device"):
        if peaks := [rank[device] for rank in trial.ranks if device in rank]:
            figures[device] = max(peaks)
    return figures
