"""`plugsft bench`: the costs and gains of each plugin of a recipe, measured on this machine."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..base.atomic import write_text
from ..base.console import format_count, progress, say
from ..base.errors import PlugsftError, RecipeError, did_you_mean
from ..hooks import DATA
from ..recipe.parse import value_of
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..registry.contracts import SPECS, contract_of, hook_mark
from .bench_results import (
    ALL,
    BASELINE,
    Bench,
    Figures,
    alone,
    ensure_comparable,
    name_without,
    read_report,
    regressions,
)
from .timing import ROUNDS, UNKNOWN, as_json, head, in_rounds
from .trials import LEFT_OUT_ALWAYS, Interrupted, Trial, TrialRunner, refuse_ranks, trials

JSON = "bench.json"
SETTINGS = ("rounds", "steps", "warmup", "launch", "instead")
FACTS = ("measured", "kept", "steppers", "preparers")
"""Options, and facts of the contenders, that the report holds."""
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

    def trials_for(self, plugins: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
        """Return the trials of contenders: key of the active plugins -> plugins left out.

        Contenders that differ only in others than `plugins` share a trial.
        """
        trials = {}
        for on in map(self.contenders.__getitem__, names):
            stay = self.without([name for name in plugins if name not in on])
            trials[key(on, plugins)] = [name for name in self.optional if name not in stay]
        return trials


def key(on: Sequence[str], plugins: Sequence[str]) -> str:
    """Name a trial by the active plugins among `plugins`."""
    return " ".join(name for name in plugins if name in on) or "none"


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


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    rounds: int
    steps: int
    warmup: int
    prepare_rounds: int | None
    launch: str
    instead: Sequence[str]
    keep: Sequence[str]
    only: Sequence[str]
    out: Path | None
    overwrite: bool
    against: Path | None
    tolerance: float


class Regressed(PlugsftError):
    """Something is slower, takes more memory or gives other results than before."""

    exit_code = 1


def bench(recipe: Recipe, active: Active, path: Path, options: Options) -> None:
    """Measure each plugin alone and left out, in fresh processes, in rounds."""
    refuse_ranks("bench")
    contenders = choose_contenders(active, options.keep, options.only)
    instead: dict[str, dict[str, Any]] = {}
    for text in options.instead:
        name, _, change = text.partition(":")
        path_of_key, _, value = change.partition("=")
        if name in contenders.optional and value:
            instead.setdefault(name, {})[path_of_key] = value_of(value)
        else:
            raise RecipeError(
                f"--instead {text}: write it PLUGIN:key.path=value, with a plugin that is measured"
            )
    file = (options.out or Path(f"{recipe.folder}-bench")) / JSON
    running = BenchRun(
        recipe, contenders, options, instead, file, new_report(path, recipe, contenders, options)
    )
    earlier = Bench(read_report(options.against)) if options.against else None
    if earlier:
        ensure_comparable(Bench(running.report), earlier)
    if file.exists() and '"contenders": {' not in file.read_text(encoding="utf8", errors="replace"):
        raise RecipeError(f"--out: {file} was not written by plugsft bench; give another folder")
    if file.exists() and not options.overwrite:
        raise RecipeError(f"--out: {file} exists; add --overwrite, or give another folder")
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, reason in contenders.kept.items():
        say(f"always on: {name}: {reason}")
    try:
        examples = (running.steps + 1) * recipe.train.batch_size
        with trials(recipe, active, options.launch, examples) as runner:
            running.measure(runner)
    except KeyboardInterrupt:
        running.write("stopped")
        raise Interrupted(f"stopped; complete rounds are in {file}") from None
    running.write("complete")
    result = Bench(running.report)
    print_table(result.table())
    say(f"figures: {file}")
    if earlier and min(len(bench.report["rounds"]) for bench in (result, earlier)) < ROUNDS:
        say(f"compared with {options.against}: memory and results; speed: {UNKNOWN}")
    if earlier and (problems := [*regressions(result, earlier, options.tolerance)]):
        raise Regressed("\n".join(f"compared with {options.against}: {text}" for text in problems))


def new_report(
    path: Path, recipe: Recipe, contenders: Contenders, options: Options
) -> dict[str, Any]:
    """Return a report without measurements."""
    return {
        **head(),
        "status": "running",
        "name": path.stem,
        "recipe": recipe.model_dump(exclude_none=True, exclude={"output"}),
        "settings": {name: getattr(options, name) for name in SETTINGS},
        **{name: getattr(contenders, name) for name in FACTS},
        "contenders": {
            name: {
                "on": on,
                "rounds": key(on, contenders.steppers),
                "preparations": key(on, contenders.preparers),
            }
            for name, on in contenders.contenders.items()
        },
        "rounds": [],
        "preparations": [],
    }


@dataclass
class BenchRun:
    """A bench while it runs."""

    recipe: Recipe
    contenders: Contenders
    options: Options
    instead: dict[str, dict[str, Any]]
    """Plugin -> keys to set where it is off."""
    file: Path
    report: dict[str, Any]
    """Written after each round."""

    @property
    def steps(self) -> int:
        """Steps of a trial."""
        return self.options.warmup + self.options.steps

    def measure(self, runner: TrialRunner) -> None:
        """Run the rounds of steps, then those of preparation."""
        options, contenders = self.options, self.contenders
        if contenders.steppers:
            trials = contenders.trials_for(contenders.steppers, [*contenders.contenders])
            self.try_baseline(runner, trials["none"])
            self.run_rounds("rounds", options.rounds, trials, partial(self.train, runner))
        rounds = options.rounds if options.prepare_rounds is None else options.prepare_rounds
        # Tokens that the recipe names are already prepared.
        if rounds and contenders.preparers and not self.recipe.data.tokens:
            measured = [name for name in contenders.preparers if name in contenders.measured]
            names = [BASELINE, *map(alone, measured)]
            trials = contenders.trials_for(contenders.preparers, names)
            self.run_rounds("preparations", rounds, trials, partial(prepare_twice, runner))

    def try_baseline(self, runner: TrialRunner, left_out: Sequence[str]) -> None:
        """Try a step of the baseline, which must run."""
        error = runner.run(self.changes(left_out), steps=1, without=left_out).error
        if error:
            raise PlugsftError(
                f"the baseline, without {', '.join(left_out)}, does not run: "
                f"{error.splitlines()[-1]}; leave on the plugin that it needs: --keep NAME"
            )

    def changes(self, left_out: Sequence[str]) -> dict[str, Any]:
        """Return the changes from --instead for plugins that are left out."""
        changes = [self.instead.get(name, {}) for name in left_out]
        return {key: value for each in changes for key, value in each.items()}

    def train(self, runner: TrialRunner, left_out: Sequence[str]) -> Figures:
        """Train a trial; return its figures."""
        return read_figures(runner.run(self.changes(left_out), self.steps, left_out))

    def run_rounds(
        self,
        part: str,
        rounds: int,
        trials: dict[str, list[str]],
        measure: Callable[[Sequence[str]], Figures],
    ) -> None:
        """Run trials in rounds; write the report after each. What fails is not repeated."""
        say(f"{part}: {rounds} of {format_count(len(trials), 'trial')}")
        failed = set[str]()
        with progress("bench", rounds * len(trials), "trials") as advance:

            def run(name: str) -> Figures | None:
                if name in failed:
                    return None
                figures = measure(trials[name])
                advance(1, name)
                if figures["error"]:
                    failed.add(name)
                    say(f"with {name}: failed: {figures['error'].splitlines()[-1]}")
                return figures

            for results in in_rounds(rounds, {name: partial(run, name) for name in trials}):
                self.report[part].append({name: value for name, value in results.items() if value})
                self.write("running")

    def write(self, status: str) -> None:
        """Write the figures so far."""
        self.report["status"] = status
        if self.report["rounds"] or self.report["preparations"]:
            results = Bench(self.report).results()
            self.report["summary"] = {result.plugin: result.summary() for result in results}
            write_text(self.file, as_json(self.report))


def read_figures(trial: Trial) -> Figures:
    """Return the figures of a trial for the report."""
    figures: Figures = {"whole": trial.seconds, "error": trial.error}
    if trial.error:
        return figures | {"out_of_memory": trial.out_of_memory}
    names = {
        "seconds": "step_seconds",
        "tokens": "tokens",
        "trained": "trained_tokens",
        "loss": "loss",
        "grad_norm": "grad_norm",
    }
    figures |= {name: trial.of(metric) for name, metric in names.items()}
    figures["exact"] = not any("float16" in dtype for dtype in trial.run["dtypes"].values())
    for device in ("host", "device"):
        if peaks := [rank[device] for rank in trial.ranks if device in rank]:
            figures[device] = max(peaks)
    return figures


def prepare_twice(runner: TrialRunner, left_out: Sequence[str]) -> Figures:
    """Prepare the data with an empty cache, then again as another run with the same cache."""
    cache = runner.folder / "cache"
    first, again = (runner.prepare(left_out, cache) for _ in range(2))
    shutil.rmtree(cache, ignore_errors=True)
    error = first["error"] or again["error"]
    return {"error": error} if error else first | {"again": again["seconds"]}


def print_table(table: list[list[str]]) -> None:
    """Print the aligned lines of a table."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = zip(row, widths, strict=True)
        say("  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip())
