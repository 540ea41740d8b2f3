"""Send configuration, metrics and results to TensorBoard, Weights & Biases, trackio, MLflow."""

import importlib
import json
import os
import time
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from plugsft import Folder, Machine, PluginError, Recipe, RecipeError, hookimpl, plugin, say, state

Kind = Literal["tensorboard", "wandb", "trackio", "mlflow"]
TABLES = ("final", "throughput", "feeding", "memory")
"""The tables of a run's record that are its results."""
KNOWN = "trackers.json"
"""In the output: the runs that trackers have begun for it."""
PAUSE, LONGEST = 5.0, 600.0
"""Seconds until a tracker that failed is tried again: at first, and at most."""
PATIENCE = {"quiet": True, "finish_timeout": 300, "finish_timeout_raises": True}
"""wandb would wait for a lost network as long as it takes. What it keeps here can be sent later."""
SERVER = "start its server, or name another: MLFLOW_TRACKING_URI"


@plugin()
class Tracker:
    """Send configuration, metrics and results to TensorBoard, Weights & Biases, trackio, MLflow.

    One that fails during the run never stops it: what it missed is sent later, or counted in the
    verdict, and stands in metrics.jsonl. A run that goes on does so in the tracker's run as well.
    """

    to: Annotated[list[Kind], Field(min_length=1)]
    """Which: "tensorboard", "wandb", "trackio", "mlflow", one or several."""
    project: str = "plugsft"
    """The project, which MLflow calls an experiment."""
    name: str = ""
    """The run's name there. Default: the name of the output folder."""
    folder: Folder | None = None
    """Folder for files of tensorboard and wandb. Default: `trackers` in the output. trackio and
    MLflow use TRACKIO_DIR and MLFLOW_TRACKING_URI instead."""

    recipe: Recipe = state()
    lines: list["Line"] = state([])
    said: str = state("")

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Refuse trackers that are not installed, know nobody here, or do not answer."""
        self.recipe = recipe
        if twice := sorted({kind for kind in self.to if self.to.count(kind) > 1}):
            raise RecipeError(f"to: '{twice[0]}' stands there twice")
        if self.folder and not {"tensorboard", "wandb"} & {*self.to}:
            raise RecipeError("folder: is for tensorboard and wandb alone; remove it")
        if machine.is_main and (problems := [*filter(None, map(refusal, self.to))]):
            raise RecipeError(problems)

    @hookimpl
    def record(self, run: dict[str, Any]) -> None:
        """Begin, or go on, in each tracker; at the end, send the results."""
        if run["status"] == "running":
            self._begin(run["steps"]["done"])
            return
        for line in self.lines:
            line.tell(run["steps"]["done"], results(run))
            line.end(run["status"])
        self.said = "; ".join(line.verdict() for line in self.lines)

    @hookimpl
    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Send what is a number."""
        for line in self.lines:
            line.tell(step, metrics)

    @hookimpl
    def verdict(self) -> str | None:
        """Say what was sent, and what was lost."""
        return self.said or None

    def _begin(self, done: int) -> None:
        path = self.recipe.folder / KNOWN
        # A run that starts over starts its trackers over.
        runs = json.loads(path.read_text(encoding="utf8")) if done and path.is_file() else {}
        for kind in self.to:
            where = f"{kind}/{self.project}"
            try:
                line = Line(kind, *self._started(kind, done, runs.get(where)))
                self.lines.append(line)
                if where not in runs:
                    line.tracker.store_init_configuration(self._configuration())
            except Exception as error:
                for line in self.lines:
                    line.end("failed")
                cure = SERVER if kind == "mlflow" else "fix that"
                raise PluginError(
                    f"plugins.tracker: {kind} does not begin: {told(error)}; {cure}, or leave "
                    f'"{kind}" out of `to`'
                ) from error
            runs[where] = line.run
            say(f"tracker: {line.place}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf8")

    def _started(self, kind: Kind, done: int, known: str | None) -> tuple[Any, str, str]:
        """Return a tracker, the run that it has begun or goes on with, and how to look at it."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS  # it imports torch

        name = self.name or self.recipe.folder.name
        folder = Path(self.folder) if self.folder else self.recipe.folder / "trackers"
        make: Any = LOGGER_TYPE_TO_CLASS[kind]
        if kind == "tensorboard":
            logs = folder / kind
            # Points of steps that were lost, or of a run that this one replaces, are left out.
            tracker = make(name, logs, purge_step=done + 1)
            tracker.start()
            return tracker, name, f"tensorboard --logdir {logs}"
        if kind == "wandb":
            folder.mkdir(parents=True, exist_ok=True)
            run = {"name": name, "id": known, "resume": "allow", "dir": folder}
            tracker = make(self.project, **run, settings=PATIENCE)
            tracker.start()
            run = tracker.tracker
            # Not by its own counter of steps: a run that goes on may make some of them again.
            run.define_metric("*", step_metric="step")
            return tracker, run.id, run.url or f"wandb sync {Path(run.dir).parent}"
        if kind == "trackio":
            resume = "allow" if known else "never"
            # Of what it is given later, or was before it went on, it keeps nothing.
            config = self._configuration()
            tracker = make(self.project, name=known or name, resume=resume, config=config)
            with redirect_stdout(StringIO()):  # it explains its dashboard at length
                tracker.start()
            return tracker, tracker.tracker.name, f"trackio show --project {self.project}"
        tracker = make(self.project, run_id=known, run_name=name)
        tracker.start()
        run = tracker.tracker.info
        place = importlib.import_module("mlflow").get_tracking_uri()
        return tracker, run.run_id, f"mlflow run {run.run_id} of {place}"

    def _configuration(self) -> dict[str, Any]:
        return flat(self.recipe.model_dump(mode="json", exclude_none=True))


class Line:
    """One tracker, and what it still has to be told."""

    def __init__(self, kind: Kind, tracker: Any, run: str, place: str) -> None:
        self.kind, self.tracker, self.run, self.place = kind, tracker, run, place
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._sent = 0
        self._error, self._ended = "", False
        self._pause, self._again = PAUSE, 0.0

    def tell(self, step: int, metrics: dict[str, Any]) -> None:
        """Send metrics, and before them what could not be sent; never raise."""
        numbers = {name: value for name, value in metrics.items() if value is not None}
        self._waiting.append((step, numbers))
        if time.monotonic() >= self._again:
            self._send()

    def end(self, status: str) -> None:
        """Send what is left, and tell how the run ended."""
        try:
            self._send()
            if self.kind == "wandb":
                self.tracker.tracker.finish(exit_code=int(status == "failed"))
            elif self.kind == "mlflow":
                ended = {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED")
                importlib.import_module("mlflow").end_run(ended)
            elif self.kind == "trackio":
                with redirect_stdout(StringIO()):
                    importlib.import_module("trackio").finish()
            else:
                self.tracker.finish()
            self._ended = True
        except Exception as error:
            self._fail(error)

    def verdict(self) -> str:
        """Say how much was sent."""
        sent = f"{self.kind}: {self._sent} of {self._sent + len(self._waiting)} entries"
        if self._ended and not self._waiting:
            return sent + (", late" if self._error else "")
        return f"{sent}, {self._error}; metrics.jsonl holds all"

    def _send(self) -> None:
        try:
            while self._waiting:
                step, numbers = self._waiting[0]
                if self.kind == "wandb":
                    self.tracker.log({**numbers, "step": step})
                else:
                    self.tracker.log(numbers, step=step)
                del self._waiting[0]
                self._sent += 1
            self._pause = PAUSE
        except Exception as error:
            self._fail(error)
            self._again = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST)

    def _fail(self, error: Exception) -> None:
        if not self._error:
            say(f"warning: {self.kind} failed, and the run goes on without it: {told(error)}")
        self._error = told(error)


def refusal(kind: Kind) -> str | None:
    """Return why a tracker cannot be used here, with the cure."""
    # A folder of that name, which wandb makes for its files, is no package.
    if getattr(find_spec(kind), "origin", None) is None:
        return f"to: \"{kind}\" needs a package: pip install {kind}, or 'plugsft[trackers]'"
    try:
        package = importlib.import_module(kind)
    except ImportError as error:
        return f'to: "{kind}" cannot be imported: {told(error)}; pip install --upgrade {kind}'
    if kind == "wandb":
        return unknown_to(package)
    return unanswered(package) if kind == "mlflow" else None


def unknown_to(wandb: Any) -> str | None:
    """Return what is missing for runs to be sent to Weights & Biases, unless they are not."""
    if wandb.setup().settings.mode != "online":
        return None
    with suppress(Exception):
        if wandb.login(prompt=False):
            return None
    return (
        'to: "wandb" knows no key to send with: `wandb login`, or keep the run here, for '
        "`wandb sync`: WANDB_MODE=offline"
    )


def unanswered(mlflow: Any) -> str | None:
    """Return what is wrong with the place where MLflow keeps its runs."""
    # It tries for minutes, unless told, and a run would wait.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    place = mlflow.get_tracking_uri()
    if place.startswith("sqlite") and find_spec("sqlalchemy"):
        return None  # asking would make it
    try:
        mlflow.search_experiments(max_results=1)
    except Exception as error:
        return f'to: "mlflow" cannot use {place}: {told(error)}; {SERVER}, or pip install mlflow'
    return None


def results(run: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers at the end of a run's record."""
    found = {name: run[name] for name in TABLES if name in run}
    return {**flat(found, "/"), "seconds": run["seconds"]}


def flat(tables: dict[str, Any], dot: str = ".", before: str = "") -> dict[str, Any]:
    """Return {"train.seed": 0, ...}; lists as JSON, as not every tracker knows them."""
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            values |= flat(value, dot, f"{before}{name}{dot}")
        else:
            values[before + name] = json.dumps(value) if isinstance(value, list) else value
    return values


def told(error: Exception) -> str:
    """Return the first line of what an error says, without an end that it has."""
    first = str(error).strip().partition("\n")[0].rstrip(".") or "no reason given"
    return f"{type(error).__name__}: {first[:300]}"
