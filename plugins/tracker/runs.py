"""Start, continue and finish a run in each tracker, through accelerate's tracker classes."""

import importlib
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

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


def start(kind: str, run: NewRun) -> StartedRun:
    """Start or continue a run in a tracker."""
    starters = {
        "tensorboard": _start_tensorboard,
        "wandb": _start_wandb,
        "trackio": _start_trackio,
        "mlflow": _start_mlflow,
    }
    return starters[kind](LOGGER_TYPE_TO_CLASS[kind], run)


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
