"""Send configuration, metrics and results to TensorBoard, Weights & Biases, trackio, MLflow."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from plugsft import Folder, Machine, Recipe, RecipeError, Run, hookimpl, plugin, state

Kind = Literal["tensorboard", "wandb", "trackio", "mlflow"]


@plugin(provides={"external_reports": None})
class Tracker:
    """Send configuration, metrics and results to TensorBoard, Weights & Biases, trackio, MLflow.

    A tracker that fails during the run does not stop it: the metrics that it missed are sent
    later, or counted in the summary, and stay in metrics.jsonl. A resumed run continues the run
    that the tracker has.
    """

    to: Annotated[list[Kind], Field(min_length=1)]
    """Where to send. The extra `trackers` has the packages of all four."""
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
    samples: Any = state()
    """The samples of the run that are not sent yet."""

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Refuse trackers that are not installed, not logged in, or do not answer."""
        from .requirements import find_problem

        self.recipe = recipe
        if self.folder and not {"tensorboard", "wandb"} & {*self.to}:
            raise RecipeError("folder: only tensorboard and wandb use it; remove it")
        if machine.is_main and (problems := [*filter(None, map(find_problem, self.to))]):
            raise RecipeError(problems)

    @hookimpl
    def ready(self, run: Run) -> None:
        """Start the run in each tracker, or continue it."""
        from .samples import NewSamples
        from .senders import start_senders

        if run.is_main:
            self.samples = NewSamples(run.output / "samples.jsonl", run.step or -1)
            self.senders = start_senders(self, self.recipe, run.step)

    @hookimpl
    def finished(self, run: Run, status: str) -> None:
        """Send the results."""
        from .values import results

        self._send_samples()
        for sender in self.senders:
            sender.send(run.step, results(run.facts))
            sender.finish(status)

    @hookimpl
    def logged(self, step: int, metrics: dict[str, Any]) -> None:
        """Send the metrics of a step, and the samples that were added."""
        self._send_samples()
        for sender in self.senders:
            sender.send(step, metrics)

    @hookimpl
    def summary(self) -> str:
        """Report how many entries were sent, and how many were lost."""
        return "; ".join(sender.describe() for sender in self.senders)

    def _send_samples(self) -> None:
        """Send the samples that another plugin has added to the output."""
        for step, samples in self.samples.read().items() if self.senders else ():
            for sender in self.senders:
                sender.send(step, samples)
