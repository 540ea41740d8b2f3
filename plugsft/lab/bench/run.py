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
from ...output.folder import ensure_inputs, ensure_page
from ...recipe.parse import value_of
from ...recipe.tables import Recipe
from ...registry import active as registry
from ..trials.runner import Trial, Trials, changed, ended, trials
from .page import write_page
from .results import Bench, Figures, ensure_alike, read_report, worse
from .timing import as_json, head, in_rounds
from .variants import Lineup, key, line_up
from .words import TITLE, console_lines, duration, markdown

JSON, MARKDOWN, PAGE = "bench.json", "bench.md", "bench.html"
AGAIN = "again"
"""Of a preparation: the seconds of one more, by another run with the same cache."""


@dataclass(frozen=True)
class Options:
    """What the command line says besides the recipe."""

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


class Ended(PlugsftError):
    """Told to stop: what whole rounds have found is kept."""

    exit_code = 130


class Worse(PlugsftError):
    """Something is slower, takes more memory or learns other than it did."""

    exit_code = 1


def bench(path: Path, overrides: Sequence[str], without: Sequence[str], options: Options) -> None:
    """Measure each plugin alone and left out, in fresh processes, in rounds; say what it brings."""
    if "RANK" in os.environ:
        raise RecipeError('bench starts ranks by itself: run it with --launch "accelerate launch"')
    recipe, active = registry.load(path, overrides, without)
    ensure_inputs(recipe, path)
    line = line_up(active, options.keep, options.only)
    for text in options.instead:
        name, _, change = text.partition(":")
        if name not in line.optional or not change.partition("=")[1]:
            raise RecipeError(
                f"--instead {text}: it is written PLUGIN:key.path=value, of an optional plugin"
            )
    folder = options.out or Path(f"{recipe.folder}-bench")
    running = Running(recipe, line, options, folder, report_of(path, recipe, line, options))
    earlier = Bench(read_report(options.against)) if options.against else None
    if earlier:
        ensure_alike(Bench(running.report), earlier)
    if (folder / JSON).exists() and not options.overwrite:
        raise RecipeError(f"--out: {folder} holds a bench; add --overwrite, or give another folder")
    ensure_bench(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, why in line.kept.items():
        say(f"always on: {name}: {why}")
    try:
        with trials(recipe, active, options.launch, running.examples) as made:
            running.measure(made)
    except KeyboardInterrupt:
        running.write("stopped")
        raise Ended(f"stopped: {running.done}, kept in {folder}") from None
    running.write("complete")
    found = Bench(running.report)
    for text in console_lines(found):
        say(text)
    say(f"figures: {folder / JSON}\ntable: {folder / MARKDOWN}\npage: {folder / PAGE}")
    if earlier and (problems := worse(found, earlier, options.tolerance)):
        raise Worse("\n".join(f"beside {options.against}: {text}" for text in problems))


def ensure_bench(folder: Path) -> None:
    """Refuse to replace files that no bench wrote."""
    for name, sign in {JSON: '"contenders": {', MARKDOWN: TITLE}.items():
        path = folder / name
        if path.exists() and sign not in path.read_text(encoding="utf8", errors="replace"):
            raise RecipeError(
                f"--out: {path} was not written by plugsft bench; give another folder"
            )
    if folder.is_dir():
        ensure_page(folder / PAGE, "--out")


def report_of(path: Path, recipe: Recipe, line: Lineup, options: Options) -> dict[str, Any]:
    """Return a report that holds nothing measured yet."""
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
class Running:
    """A bench that runs."""

    recipe: Recipe
    line: Lineup
    options: Options
    folder: Path
    report: dict[str, Any]
    """Written after each round."""
    failed: set[tuple[str, str]] = field(default_factory=set)
    """What need not be tried again."""

    @property
    def examples(self) -> int:
        """How many examples are trained on: as many as all steps take, unless said."""
        if self.options.examples is not None:
            return self.options.examples
        steps = self.options.warmup + self.options.steps + 1
        return steps * self.recipe.train.batch_size

    @property
    def done(self) -> str:
        """How much of it is measured."""
        steps, prepared = len(self.report["rounds"]), len(self.report["preparations"])
        return f"{format_count(steps, 'whole round')} of steps and {prepared} of preparing"

    def measure(self, made: Trials) -> None:
        """Run all rounds of steps, then those of preparing."""
        options, line = self.options, self.line
        steps = line.trials_of(line.steppers)
        if line.steppers:
            took = self.first(made, steps["none"])
            count, rounds = options.rounds * len(steps), format_count(options.rounds, "round")
            say(f"steps: {count} trials in {rounds}, {duration(count * took)}")
            self.in_turn("rounds", options.rounds, self.step_trials(made, steps))
        again = options.rounds if options.prepare_rounds is None else options.prepare_rounds
        prepared = line.trials_of(line.preparers)
        # Tokens that the recipe names are made already.
        if again and line.preparers and not self.recipe.data.tokens:
            say(f"preparing: {2 * again * len(prepared)} times, in {format_count(again, 'round')}")
            self.in_turn("preparations", again, preparations(made, prepared))

    def first(self, made: Trials, left_out: Sequence[str]) -> float:
        """Try the baseline: it has to run. Return how long a trial will take, about."""
        trial = made.run(self.changes(left_out), steps=1, without=left_out)
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
        """Return what the recipe says in the place of plugins that are left out."""
        given = [text.partition(":") for text in self.options.instead]
        pairs = [change.partition("=") for name, _, change in given if name in left_out]
        return {place: value_of(text) for place, _, text in pairs}

    def step_trials(
        self, made: Trials, trials: dict[str, list[str]]
    ) -> dict[str, Callable[[], Figures]]:
        """Return what runs each trial of some steps."""
        steps = self.options.warmup + self.options.steps

        def run(left_out: list[str]) -> Figures:
            return figures_of(made.run(self.changes(left_out), steps, left_out))

        return {name: partial(run, out) for name, out in trials.items()}

    def in_turn(self, part: str, rounds: int, trials: dict[str, Callable[[], Figures]]) -> None:
        """Run trials in rounds; write what they gave after each."""
        with progress("bench", rounds * len(trials), "trials") as advance:

            def told(name: str, trial: Callable[[], Figures]) -> Figures | None:
                if (part, name) in self.failed:
                    return None
                found = trial()
                advance(1, name)
                if found["error"]:
                    self.failed.add((part, name))
                    say(f"with {name}: failed: {found['error'].splitlines()[-1]}")
                return found

            contenders = {name: partial(told, name, trial) for name, trial in trials.items()}
            for found in in_rounds(rounds, contenders):
                self.report[part].append({name: one for name, one in found.items() if one})
                self.write("running")

    def write(self, status: str) -> None:
        """Write what there is: figures, and a table and a page of them."""
        self.report["status"] = status
        if self.report["rounds"] or self.report["preparations"]:
            write_text(self.folder / JSON, as_json(self.report))
            found = Bench(self.report)
            write_text(self.folder / MARKDOWN, markdown(found))
            write_page(self.folder / PAGE, found)


def figures_of(trial: Trial) -> Figures:
    """Return what is kept of a trial."""
    found: Figures = {"whole": trial.seconds, "error": trial.error}
    if trial.error:
        return found | {"out_of_memory": trial.out_of_memory}
    names = {
        "seconds": "step_seconds",
        "tokens": "tokens",
        "trained": "trained_tokens",
        "loss": "loss",
        "grad_norm": "grad_norm",
    }
    found |= {name: trial.of(metric) for name, metric in names.items()}
    found["exact"] = not any("float16" in dtype for dtype in trial.run["dtypes"].values())
    for place in ("host", "device"):
        if held := [rank[place] for rank in trial.ranks if place in rank]:
            found[place] = max(held)
    return found


def preparations(made: Trials, trials: dict[str, list[str]]) -> dict[str, Callable[[], Figures]]:
    """Return what prepares the data, each time with a cache and an output of its own, and again."""

    def run(left_out: list[str]) -> Figures:
        folder = made.folder / "preparing"
        first, again = (prepared(made, folder, name, left_out) for name in ("first", AGAIN))
        shutil.rmtree(folder)
        if first["error"] or again["error"]:
            return {"error": first["error"] or again["error"]}
        return first | {AGAIN: again["seconds"]}

    return {name: partial(run, out) for name, out in trials.items()}


def prepared(made: Trials, folder: Path, name: str, left_out: Sequence[str]) -> Figures:
    """Prepare the data in a fresh process, as a run with this output would."""
    inside = folder / name
    inside.mkdir(parents=True)
    tables = changed(made.tables, {"data.tokens": None, "output": str(inside / "run")})
    for plugin in left_out:
        tables["plugins"].pop(plugin, None)
    # What it keeps elsewhere would be found there.
    tables["plugins"].get("arrow_cache", {}).pop("folder", None)
    path, said = inside / "recipe.toml", inside / "said.txt"
    path.write_text(tomli_w.dumps(tables))
    words = [sys.executable, "-m", "plugsft.lab.bench.preparation", str(path)]
    code, _ = ended(words, said, PLUGSFT_CACHE=str(folder / "cache"))
    if code:
        return {"error": said.read_text(errors="replace").strip()[-2000:] or f"exit code {code}"}
    found: Figures = json.loads((inside / "prepared.json").read_text())
    return found
