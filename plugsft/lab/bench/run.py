"""`plugsft bench`: the costs and gains of each plugin of a recipe, measured on this machine."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from ...base.atomic import write_text
from ...base.console import format_count, progress, say
from ...base.errors import PlugsftError, RecipeError
from ...recipe.parse import value_of
from ...recipe.tables import Recipe
from ...registry.active import Active
from ..trials.runner import Trial, TrialRunner, run_process, trials, with_changes
from .contenders import Contenders, choose_contenders, key
from .results import Bench, Figures, ensure_comparable, read_report, regressions
from .tables import TITLE, duration, format_console, markdown, summary
from .timing import UNKNOWN, as_json, head, in_rounds

JSON, MARKDOWN = "bench.json", "bench.md"
AGAIN = "again"
"""Key of the seconds of a second preparation, by another run with the same cache."""


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    rounds: int
    steps: int
    warmup: int
    examples: int | None
    prepare_rounds: int | None
    launch: str
    instead: Sequence[str]
    keep: Sequence[str]
    only: Sequence[str]
    out: Path | None
    overwrite: bool
    against: Path | None
    tolerance: float


class Interrupted(PlugsftError):
    """Ctrl-C: the results of whole rounds stay on disk."""

    exit_code = 130


class Regressed(PlugsftError):
    """Something is slower, takes more memory or gives other results than before."""

    exit_code = 1


def bench(recipe: Recipe, active: Active, path: Path, options: Options) -> None:
    """Measure each plugin alone and left out, in fresh processes, in rounds."""
    if "RANK" in os.environ:
        raise RecipeError('bench starts ranks by itself: run it with --launch "accelerate launch"')
    contenders = choose_contenders(active, options.keep, options.only)
    for text in options.instead:
        name, _, change = text.partition(":")
        if name not in contenders.optional or not change.partition("=")[1]:
            raise RecipeError(
                f"--instead {text}: write it PLUGIN:key.path=value, with a plugin that is measured"
            )
    folder = options.out or Path(f"{recipe.folder}-bench")
    report = new_report(path, recipe, contenders, options)
    running = BenchRun(recipe, contenders, options, folder, report)
    earlier = Bench(read_report(options.against)) if options.against else None
    if earlier:
        ensure_comparable(Bench(running.report), earlier)
    if (folder / JSON).exists() and not options.overwrite:
        raise RecipeError(f"--out: {folder} holds a bench; add --overwrite, or give another folder")
    ensure_bench(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, reason in contenders.kept.items():
        say(f"always on: {name}: {reason}")
    try:
        with trials(recipe, active, options.launch, running.examples) as runner:
            running.measure(runner)
    except KeyboardInterrupt:
        running.write("stopped")
        raise Interrupted(f"stopped: {running.done} are in {folder}") from None
    running.write("complete")
    result = Bench(running.report)
    for text in format_console(result):
        say(text)
    say(f"figures: {folder / JSON}\ntable: {folder / MARKDOWN}")
    if earlier and min(len(bench.report["rounds"]) for bench in (result, earlier)) < 2:
        say(f"compared with {options.against}: memory and results; speed: {UNKNOWN}")
    if earlier and (problems := regressions(result, earlier, options.tolerance)):
        raise Regressed("\n".join(f"compared with {options.against}: {text}" for text in problems))


def ensure_bench(folder: Path) -> None:
    """Refuse to replace files of the user."""
    for name, mark in {JSON: '"contenders": {', MARKDOWN: TITLE}.items():
        path = folder / name
        if path.exists() and mark not in path.read_text(encoding="utf8", errors="replace"):
            raise RecipeError(
                f"--out: {path} was not written by plugsft bench; give another folder"
            )


def new_report(
    path: Path, recipe: Recipe, contenders: Contenders, options: Options
) -> dict[str, Any]:
    """Return a report without measurements."""
    return {
        **head(),
        "status": "running",
        "name": path.stem,
        "recipe": recipe.model_dump(exclude_none=True, exclude={"output"}),
        "settings": {
            "rounds": options.rounds,
            "steps": options.steps,
            "warmup": options.warmup,
            "examples": options.examples,
            "launch": options.launch,
            "instead": list(options.instead),
        },
        "measured": contenders.measured,
        "kept": contenders.kept,
        "steppers": contenders.steppers,
        "preparers": contenders.preparers,
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
    folder: Path
    report: dict[str, Any]
    """Written after each round."""
    failed: set[tuple[str, str]] = field(default_factory=set)
    """Part and name of trials that failed, and are not repeated."""

    @property
    def examples(self) -> int:
        """Number of examples. Default: as many as the steps take."""
        if self.options.examples is not None:
            return self.options.examples
        steps = self.options.warmup + self.options.steps + 1
        return steps * self.recipe.train.batch_size

    @property
    def done(self) -> str:
        """The complete rounds, in words."""
        steps, prepared = len(self.report["rounds"]), len(self.report["preparations"])
        return f"{format_count(steps, 'complete round')} of steps and {prepared} of preparing"

    def measure(self, runner: TrialRunner) -> None:
        """Run the rounds of steps, then those of preparation."""
        options, contenders = self.options, self.contenders
        if contenders.steppers:
            trials = contenders.trials_for(contenders.steppers)
            seconds = self.try_baseline(runner, trials["none"])
            count, in_all = options.rounds * len(trials), format_count(options.rounds, "round")
            say(f"steps: {count} trials in {in_all}, {duration(count * seconds)}")
            self.run_rounds("rounds", options.rounds, self.step_measurements(runner, trials))
        rounds = options.rounds if options.prepare_rounds is None else options.prepare_rounds
        # Tokens that the recipe names are already prepared.
        if rounds and contenders.preparers and not self.recipe.data.tokens:
            trials = contenders.trials_for(contenders.preparers)
            say(f"preparing: {2 * rounds * len(trials)} times, in {format_count(rounds, 'round')}")
            self.run_rounds("preparations", rounds, preparations(runner, trials))

    def try_baseline(self, runner: TrialRunner, left_out: Sequence[str]) -> float:
        """Try the baseline, which must run; return the expected seconds of a trial."""
        trial = runner.run(self.changes(left_out), steps=1, without=left_out)
        if trial.error:
            why = "out of memory" if trial.out_of_memory else trial.error.splitlines()[-1]
            raise PlugsftError(
                f"the baseline, without {', '.join(left_out)}, does not run: {why}; leave on the "
                "plugin that it needs: --keep NAME"
            )
        steps = self.options.warmup + self.options.steps
        return trial.seconds + steps * trial.of("step_seconds")[0]

    def changes(self, left_out: Sequence[str]) -> dict[str, Any]:
        """Return the changes from --instead for plugins that are left out."""
        parts = [text.partition(":") for text in self.options.instead]
        pairs = [change.partition("=") for name, _, change in parts if name in left_out]
        return {key: value_of(text) for key, _, text in pairs}

    def step_measurements(
        self, runner: TrialRunner, trials: dict[str, list[str]]
    ) -> dict[str, Callable[[], Figures]]:
        """Return a function for each trial of steps."""
        steps = self.options.warmup + self.options.steps

        def run(left_out: list[str]) -> Figures:
            return read_figures(runner.run(self.changes(left_out), steps, left_out))

        return {name: partial(run, out) for name, out in trials.items()}

    def run_rounds(self, part: str, rounds: int, trials: dict[str, Callable[[], Figures]]) -> None:
        """Run trials in rounds; write the report after each."""
        with progress("bench", rounds * len(trials), "trials") as advance:

            def measure(name: str, trial: Callable[[], Figures]) -> Figures | None:
                if (part, name) in self.failed:
                    return None
                figures = trial()
                advance(1, name)
                if figures["error"]:
                    self.failed.add((part, name))
                    say(f"with {name}: failed: {figures['error'].splitlines()[-1]}")
                return figures

            measurements = {name: partial(measure, name, trial) for name, trial in trials.items()}
            for results in in_rounds(rounds, measurements):
                self.report[part].append({name: value for name, value in results.items() if value})
                self.write("running")

    def write(self, status: str) -> None:
        """Write the report so far: figures and table."""
        self.report["status"] = status
        if self.report["rounds"] or self.report["preparations"]:
            result = Bench(self.report)
            self.report["summary"] = {line.plugin: summary(line) for line in result.lines()}
            write_text(self.folder / JSON, as_json(self.report))
            write_text(self.folder / MARKDOWN, markdown(result))


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


def preparations(
    runner: TrialRunner, trials: dict[str, list[str]]
) -> dict[str, Callable[[], Figures]]:
    """Return a function for each trial of preparation: with an empty cache, then again."""

    def run(left_out: list[str]) -> Figures:
        folder = runner.folder / "preparing"
        first, again = (prepare(runner, folder, name, left_out) for name in ("first", AGAIN))
        shutil.rmtree(folder)
        if first["error"] or again["error"]:
            return {"error": first["error"] or again["error"]}
        return first | {AGAIN: again["seconds"]}

    return {name: partial(run, out) for name, out in trials.items()}


def prepare(runner: TrialRunner, folder: Path, name: str, left_out: Sequence[str]) -> Figures:
    """Prepare the data in a fresh process, as a run with this output would."""
    trial_folder = folder / name
    trial_folder.mkdir(parents=True)
    tables = with_changes(runner.tables, {"data.tokens": None, "output": str(trial_folder / "run")})
    for plugin in left_out:
        tables["plugins"].pop(plugin, None)
    # The first preparation starts with an empty cache.
    for cache in runner.recipe.providers("cached_tokens"):
        tables["plugins"].get(cache.plugin, {}).pop(cache.option, None)
    path, log = trial_folder / "recipe.toml", trial_folder / "output.txt"
    path.write_text(tomli_w.dumps(tables))
    words = [sys.executable, "-m", "plugsft.lab.bench.preparation", str(path)]
    code, _ = run_process(words, log, PLUGSFT_CACHE=str(folder / "cache"))
    if code:
        return {"error": log.read_text(errors="replace").strip()[-2000:] or f"exit code {code}"}
    figures: Figures = json.loads((trial_folder / "prepared.json").read_text())
    return figures
