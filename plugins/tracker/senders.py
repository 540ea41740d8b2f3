"""The run in each tracker, by accelerate's classes: started or continued, sent to, and finished."""

from __future__ import annotations

import importlib
import json
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from plugsft import PluginError, Recipe, say, write_text

from .samples import Samples, log_samples
from .values import MLFLOW_CURE, describe_error, flatten

if TYPE_CHECKING:
    from . import Tracker

RUN_IDS = "trackers.json"
"""File in the output: the ids that trackers gave to the run, to continue it after a resume."""


def start_senders(plugin: Tracker, recipe: Recipe, step: int) -> list[Sender]:
    """Start a run in each tracker, or continue it after a step; return their senders."""
    senders: list[Sender] = []
    path = recipe.folder / RUN_IDS
    # A run from step 0 starts new runs in its trackers.
    run_ids = json.loads(path.read_text(encoding="utf8")) if step and path.is_file() else {}
    configuration = flatten(recipe.model_dump(mode="json", exclude_none=True))
    name = plugin.name or recipe.folder.name
    folder = Path(plugin.folder) if plugin.folder else recipe.folder / "trackers"
    for kind in dict.fromkeys(plugin.to):
        key = f"{kind}/{plugin.project}"
        run_id = run_ids.get(key)
        try:
            run = NewRun(plugin.project, name, folder, configuration, step, run_id)
            tracker, run_ids[key], view = STARTERS[kind](LOGGER_TYPE_TO_CLASS[kind], run)
            senders.append(Sender(kind, tracker))
            if run_id is None:
                tracker.store_init_configuration(configuration)
        except Exception as error:
            for sender in senders:
                sender.finish("failed")
            cure = MLFLOW_CURE if kind == "mlflow" else "correct that"
            raise PluginError(
                f"plugins.tracker: {kind} cannot start: {describe_error(error)}; {cure}, or "
                f'remove "{kind}" from `to`'
            ) from error
        say(f"tracker: {view}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(run_ids, indent=1) + "\n")
    return senders


FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
"""Seconds until a tracker that failed is tried again; each failure doubles them."""


class Sender:
    """One tracker, and the metrics that it has not received yet."""

    def __init__(self, kind: str, tracker: Any) -> None:
        self._kind, self._tracker = kind, tracker
        self._queue: list[tuple[int, dict[str, Any] | Samples]] = []
        self._sent = 0
        self._error, self._finished = "", False
        self._pause, self._next_try = FIRST_PAUSE, 0.0

    def send(self, step: int, entry: dict[str, Any] | Samples) -> None:
        """Send metrics or samples, after those that are still in the queue; never raise."""
        if isinstance(entry, dict):
            entry = {name: value for name, value in entry.items() if value is not None}
        self._queue.append((step, entry))
        if time.monotonic() >= self._next_try:
            self._send_queue()

    def finish(self, status: str) -> None:
        """Send the queue, and finish the tracker's run with a status."""
        try:
            self._send_queue()
            finish(self._kind, self._tracker, status)
            self._finished = True
        except Exception as error:
            self._warn(error)

    def describe(self) -> str:
        """Report how many entries were sent."""
        sent = f"{self._kind}: {self._sent} of {self._sent + len(self._queue)} entries"
        if self._finished and not self._queue:
            return sent + (", late" if self._error else "")
        return f"{sent}, {self._error}; metrics.jsonl has all"

    def _send_queue(self) -> None:
        try:
            while self._queue:
                step, entry = self._queue[0]
                if isinstance(entry, list):
                    log_samples(self._kind, self._tracker, step, entry)
                elif self._kind == "wandb":
                    self._tracker.log({**entry, "step": step})
                else:
                    self._tracker.log(entry, step=step)
                del self._queue[0]
                self._sent += 1
            self._pause = FIRST_PAUSE
        except Exception as error:
            self._warn(error)
            self._next_try = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _warn(self, error: Exception) -> None:
        """Warn of the first error; keep the last for the report."""
        text = describe_error(error)
        if not self._error:
            say(f"warning: {self._kind} failed, and the run continues without it: {text}")
        self._error = text


WANDB_SETTINGS = {"quiet": True, "finish_timeout": 300, "finish_timeout_raises": True}
"""By default wandb waits for a lost network without end; `wandb sync` can send the run later."""


@dataclass(frozen=True)
class NewRun:
    """A run to start or to continue."""

    project: str
    name: str
    folder: Path
    """Folder for the tracker's files."""
    configuration: dict[str, Any]
    step: int
    """The last finished step."""
    run_id: str | None
    """The tracker's id of the run to continue."""


StartedRun = tuple[Any, str, str]
"""The tracker, its id of the run, and the command or address that shows the run."""


def _start_tensorboard(tracker_class: Any, run: NewRun) -> StartedRun:
    logs = run.folder / "tensorboard"
    # Leaves out the points of later steps: a resumed run logs them again.
    tracker = tracker_class(run.name, logs, purge_step=run.step + 1)
    tracker.start()
    return tracker, run.name, f"tensorboard --logdir {logs}"


def _start_wandb(tracker_class: Any, run: NewRun) -> StartedRun:
    run.folder.mkdir(parents=True, exist_ok=True)
    tracker = tracker_class(
        run.project,
        name=run.name,
        id=run.run_id,
        resume="allow",
        dir=run.folder,
        settings=WANDB_SETTINGS,
    )
    tracker.start()
    wandb_run = tracker.tracker
    # Not wandb's own step counter: a resumed run may log some steps again.
    wandb_run.define_metric("*", step_metric="step")
    view = wandb_run.url or f"wandb sync {Path(wandb_run.dir).parent}"
    return tracker, wandb_run.id, view


def _start_trackio(tracker_class: Any, run: NewRun) -> StartedRun:
    tracker = tracker_class(
        run.project,
        name=run.run_id or run.name,
        resume="allow" if run.run_id else "never",
        # trackio ignores a configuration that comes after the start.
        config=run.configuration,
    )
    with redirect_stdout(StringIO()):  # it prints how to use its dashboard
        tracker.start()
    return tracker, tracker.tracker.name, f"trackio show --project {run.project}"


def _start_mlflow(tracker_class: Any, run: NewRun) -> StartedRun:
    tracker = tracker_class(run.project, run_id=run.run_id, run_name=run.name)
    tracker.start()
    run_id = tracker.tracker.info.run_id
    uri = importlib.import_module("mlflow").get_tracking_uri()
    return tracker, run_id, f"mlflow run {run_id} of {uri}"


STARTERS = {
    "tensorboard": _start_tensorboard,
    "wandb": _start_wandb,
    "trackio": _start_trackio,
    "mlflow": _start_mlflow,
}


def finish(kind: str, tracker: Any, status: str) -> None:
    """Finish a run with its status: "completed", "stopped" or "failed"."""
    if kind == "wandb":
        tracker.tracker.finish(exit_code=int(status == "failed"))
    elif kind == "mlflow":
        mlflow_status = {"completed": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED")
        importlib.import_module("mlflow").end_run(mlflow_status)
    elif kind == "trackio":
        with redirect_stdout(StringIO()):
            importlib.import_module("trackio").finish()
    else:
        tracker.finish()
