"""`plugsft bench`: what each plugin of a recipe costs and brings, measured on this machine."""

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
from ...output.folder import ensure_page
from ...recipe.parse import value_of
from ...recipe.tables import Recipe
from ...registry.active import Active
from ..trials.runner import Trial, TrialRunner, run_process, trials, with_changes
from .contenders import Contenders, choose_contenders, key
from .page import write_page
from .results import Bench, Figures, ensure_comparable, read_report, regressions
from .tables import TITLE, duration, format_console, markdown
from .timing import as_json, head, in_rounds

JSON, MARKDOWN, PAGE = "bench.json", "bench.md", "bench.html"
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
    line = choose_contenders(active, options.keep, options.only)
    for text in options.instead:
        name, _, change = text.partition(":")
        if name not in line.optional or not change.partition("=")[1]:
            raise RecipeError(
                f"--instead {text}: it is written PLUGIN:key.path=value, of an optional plugin"
            )
    folder = options.out or Path(f"{recipe.folder}-bench")
    running = BenchRun(recipe, line, options, folder, new_report(path, recipe, line, options))
    earlier = Bench(read_report(options.against)) if options.against else None
    if earlier:
        ensure_comparable(Bench(running.report), earlier)
    if (folder / JSON).exists() and not options.overwrite:
        raise RecipeError(f"--out: {folder} holds a bench; add --overwrite, or give another folder")
    ensure_bench(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, why in line.kept.items():
        say(f"always on: {name}: {why}")
    try:
        with trials(recipe, active, options.launch, running.examples) as runner:
            running.measure(runner)
    except KeyboardInterrupt:
        running.write("stopped")
        raise Interrupted(f"stopped: {running.done}, kept in {folder}") from None
    running.write("complete")
    result = Bench(running.report)
    for text in format_console(result):
        say(text)
    say(f"figures: {folder / JSON}\ntable: {folder / MARKDOWN}\npage: {folder / PAGE}")
    if earlier and (problems := regressions(result, earlier, options.tolerance)):
        raise Regressed("\n".join(f"beside {options.against}: {text}" for text in problems))


def ensure_bench(folder: Path) -> None:
    """Refuse to replace files of the user."""
    for name, sign in {JSON: '"contenders": {', MARKDOWN: TITLE}.items():
        path = folder / name
        if path.exists() and sign not in path.read_text(encoding="utf8", errors="replace"):
            raise RecipeError(
                f"--out: {path} was not written by plugsft bench; give another folder"
            )
    if folder.is_dir():
        ensure_page(folder / PAGE, "--out")


def new_report(path: Path, recipe: Recipe, line: Contenders, options: Options) -> dict[str, Any]:
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
        "measured": line.measured,
        "kept": line.kept,
        "steppers": line.steppers,
        "preparers": line.preparers,
        "contenders": {
            name: {
                "on": on,
                "rounds": key(on, line.steppers),
                "preparations": key(on, line.preparers),
            }
            for name, on in line.contenders.items()
        },
        "rounds": [],
        "preparations": [],
    }


@dataclass
class BenchRun:
    """A bench while it runs."""

    recipe: Recipe
    line: Contenders
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
        """The finished rounds, in words."""
        steps, prepared = len(self.report["rounds"]), len(self.report["preparations"])
        return f"{format_count(steps, 'whole round')} of steps and {prepared} of preparing"

    def measure(self, runner: TrialRunner) -> None:
        """Run the rounds of steps, then those of preparation."""
        options, line = self.options, self.line
        steps = line.trials_for(line.steppers)
        if line.steppers:
            took = self.first(runner, steps["none"])
            count, rounds = options.rounds * len(steps), format_count(options.rounds, "round")
            say(f"steps: {count} trials in {rounds}, {duration(count * took)}")
            self.run_rounds("rounds", options.rounds, self.step_measurements(runner, steps))
        again = options.rounds if options.prepare_rounds is None else options.prepare_rounds
        prepared = line.trials_for(line.preparers)
        # Tokens that the recipe names are already prepared.
        if again and line.preparers and not self.recipe.data.tokens:
            say(f"preparing: {2 * again * len(prepared)} times, in {format_count(again, 'round')}")
            self.run_rounds("preparations", again, preparations(runner, prepared))

    def first(self, runner: TrialRunner, left_out: Sequence[str]) -> float:
        """Try the baseline, which must run; return about how long a trial takes."""
        trial = runner.run(self.changes(left_out), steps=1, without=left_out)
        if trial.error:
            why = "out of memory" if trial.out_of_memory else trial.error.splitlines()[-1]
            raise PlugsftError(
                f"the baseline, without {', '.join(left_out)}, does not run: {why}; let it have "
                "the plugin that it needs: --keep NAME"
            )
        return (
            trial.seconds + (self.options.warmup + self.options.steps) * trial.of("step_seconds")[0]
        )

    def changes(self, left_out: Sequence[str]) -> dict[str, Any]:
        """Return the changes from --instead for plugins that are left out."""
        parts = [text.partition(":") for text in self.options.instead]
        pairs = [change.partition("=") for name, _, change in parts if name in left_out]
        return {place: value_of(text) for place, _, text in pairs}

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

            def told(name: str, trial: Callable[[], Figures]) -> Figures | None:
                if (part, name) in self.failed:
                    return None
                figures = trial()
                advance(1, name)
                if figures["error"]:
                    self.failed.add((part, name))
                    say(f"with {name}: failed: {figures['error'].splitlines()[-1]}")
                return figures

            contenders = {name: partial(told, name, trial) for name, trial in trials.items()}
            for figures in in_rounds(rounds, contenders):
                self.report[part].append({name: value for name, value in figures.items() if value})
                self.write("running")

    def write(self, status: str) -> None:
        """Write the report so far: figures, table and page."""
        self.report["status"] = status
        if self.report["rounds"] or self.report["preparations"]:
            write_text(self.folder / JSON, as_json(self.report))
            result = Bench(self.report)
            write_text(self.folder / MARKDOWN, markdown(result))
            write_page(self.folder / PAGE, result)


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
    for place in ("host", "device"):
        if peaks := [rank[place] for rank in trial.ranks if place in rank]:
            figures[place] = max(peaks)
    return figures


def preparations(
    runner: TrialRunner, trials: dict[str, list[str]]
) -> dict[str, Callable[[], Figures]]:
    """Return a function for each trial of preparation: with an empty cache, then once more."""

    def run(left_out: list[str]) -> Figures:
        folder = runner.folder / "preparing"
        first, again = (prepared(runner, folder, name, left_out) for name in ("first", AGAIN))
        shutil.rmtree(folder)
        if first["error"] or again["error"]:
            return {"error": first["error"] or again["error"]}
        return first | {AGAIN: again["seconds"]}

    return {name: partial(run, out) for name, out in trials.items()}


def prepared(runner: TrialRunner, folder: Path, name: str, left_out: Sequence[str]) -> Figures:
    """Prepare the data in a fresh process, as a run with this output would."""
    inside = folder / name
    inside.mkdir(parents=True)
    tables = with_changes(runner.tables, {"data.tokens": None, "output": str(inside / "run")})
    for plugin in left_out:
        tables["plugins"].pop(plugin, None)
    # The cache must be empty at first.
    tables["plugins"].get("arrow_cache", {}).pop("folder", None)
    path, log = inside / "recipe.toml", inside / "output.txt"
    path.write_text(tomli_w.dumps(tables))
    words = [sys.executable, "-m", "plugsft.lab.bench.preparation", str(path)]
    code, _ = run_process(words, log, PLUGSFT_CACHE=str(folder / "cache"))
    if code:
        return {"error": log.read_text(errors="replace").strip()[-2000:] or f"exit code {code}"}
    figures: Figures = json.loads((inside / "prepared.json").read_text())
    return figures
