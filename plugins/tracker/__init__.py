"""Send configuration, metrics and results to TensorBoard, Weights & Biases, trackio, MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from plugsft import (
    Folder,
    Machine,
    PluginError,
    Recipe,
    RecipeError,
    Run,
    Status,
    hookimpl,
    plugin,
    say,
    state,
)

Kind = Literal["tensorboard", "wandb", "trackio", "mlflow"]
RUN_IDS = "trackers.json"
"""File in the output: the ids that trackers gave to the run, to continue it after a resume."""


@plugin(provides={"external_reports": None})
class Tracker:
    """Send configuration, metrics and results to TensorBoard, Weights & Biases, trackio, MLflow.

    A tracker that fails during the run does not stop it: the metrics that it missed are sent
    later, or counted in the summary, and stay in metrics.jsonl. A resumed run continues the run
    that the tracker has.
    """

    to: Annotated[list[Kind], Field(min_length=1)]
    """One or several of "tensorboard", "wandb", "trackio", "mlflow"."""
    project: str = "plugsft"
    """The project, which MLflow calls an experiment."""
    name: str = ""
    """The run's name in the tracker. Default: the name of the output folder."""
    folder: Folder | None = None
    """Folder for files of tensorboard and wandb. Default: `trackers` in the output. trackio and
    MLflow use TRACKIO_DIR and MLFLOW_TRACKING_URI instead."""

    recipe: Recipe = state()
    senders: list[Any] = state([])
    """One for each tracker."""
    sent: str = state("")

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Refuse trackers that are not installed, not logged in, or do not answer."""
        from .requirements import find_problem

        self.recipe = recipe
        if repeated := sorted({kind for kind in self.to if self.to.count(kind) > 1}):
            raise RecipeError(f"to: '{repeated[0]}' is listed twice")
        if self.folder and not {"tensorboard", "wandb"} & {*self.to}:
            raise RecipeError("folder: only tensorboard and wandb use it; remove it")
        if machine.is_main and (problems := [*filter(None, map(find_problem, self.to))]):
            raise RecipeError(problems)

    @hookimpl
    def ready(self, run: Run) -> None:
        """Start the run in each tracker, or continue it."""
        if run.is_main:
            self._start(run.step)

    @hookimpl
    def finished(self, run: Run, status: Status) -> None:
        """Send the results."""
        from .values import results

        for sender in self.senders:
            sender.send(run.step, results(run.facts))
            sender.finish(status)
        self.sent = "; ".join(sender.describe() for sender in self.senders)

    @hookimpl
    def logged(self, step: int, metrics: dict[str, Any]) -> None:
        """Send the metrics of a step."""
        for sender in self.senders:
            sender.send(step, metrics)

    @hookimpl
    def summary(self) -> str | None:
        """Report how many entries were sent, and how many were lost."""
        return self.sent or None

    def _start(self, step: int) -> None:
        from .runs import NewRun, start
        from .sender import Sender
        from .values import MLFLOW_CURE, describe_error, flatten

        path = self.recipe.folder / RUN_IDS
        # A run from step 0 starts new runs in its trackers.
        run_ids = json.loads(path.read_text(encoding="utf8")) if step and path.is_file() else {}
        configuration = flatten(self.recipe.model_dump(mode="json", exclude_none=True))
        name = self.name or self.recipe.folder.name
        folder = Path(self.folder) if self.folder else self.recipe.folder / "trackers"
        for kind in self.to:
            key = f"{kind}/{self.project}"
            run_id = run_ids.get(key)
            try:
                run = start(kind, NewRun(self.project, name, folder, configuration, step, run_id))
                self.senders.append(Sender(kind, run.tracker))
                if run_id is None:
                    run.tracker.store_init_configuration(configuration)
            except Exception as error:
                for sender in self.senders:
                    sender.finish("failed")
                cure = MLFLOW_CURE if kind == "mlflow" else "correct that"
                raise PluginError(
                    f"plugins.tracker: {kind} cannot start: {describe_error(error)}; {cure}, or "
                    f'remove "{kind}" from `to`'
                ) from error
            run_ids[key] = run.run_id
            say(f"tracker: {run.view}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run_ids, indent=1) + "\n", encoding="utf8")
