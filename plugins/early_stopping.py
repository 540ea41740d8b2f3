"""Stop the run when a metric stops improving: affects results."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat

from plugsft import PluginError, RecipeError, Run, hookimpl, plugin, state

SPEED = ("tokens_per_second", "step_seconds", "memory_gib")
"""Metrics that differ between ranks."""


@plugin(
    provides={"early_stop": None},
    affects_results=["metric", "best", "patience", "min_delta"],
    watches=["metric"],
)
class EarlyStopping:
    """Stop the run when a metric stops improving: affects results.

    The run still writes its checkpoint, model and report. With `checkpoint.keep_best`, the model is
    the best one.
    """

    metric: str = "eval_loss"
    """Metric to watch: of evaluations (eval_...), or of steps, such as loss."""
    best: Literal["lowest", "highest"] | None = None
    """Which value of the metric is the best; to be set for what is no loss."""
    patience: Annotated[int, Field(ge=1)] = 3
    """The run stops after this number of evaluations (or steps) without improvement."""
    min_delta: NonNegativeFloat = 0.0
    """Improvements up to this size do not count."""

    best_value: float | None = state()
    best_step: int = state(0)
    waited: int = state(0)
    """Evaluations or steps since the best value."""
    result: str = state("")

    @hookimpl
    def check(self) -> None:
        """Refuse a metric that differs between ranks."""
        if self.metric in SPEED:
            raise RecipeError(
                f"metric: '{self.metric}' differs from rank to rank and from run to run; watch a "
                "loss instead"
            )
        is_loss = self.metric.endswith("loss")
        if is_loss and self.best == "highest":
            raise RecipeError(
                f'best = "highest" would stop at the worst: {self.metric} is a loss; remove best'
            )
        if not is_loss and self.best is None:
            raise RecipeError(
                f"best: '{self.metric}' is no loss; set the value that is the best, \"highest\" or "
                '"lowest"'
            )

    @hookimpl
    def ready(self, run: Run) -> None:
        """Stop at once if the run resumes from the checkpoint of its early stop."""
        self._stop_if_due(run)

    @hookimpl
    def logged(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        """Compare the metric with its best value.

        The model before step 1 does not count: it has no checkpoint that could be the best.
        """
        if step == 0 or self._of_evaluations != ("eval_loss" in metrics):
            return
        if self.metric not in metrics:
            raise PluginError(
                f"plugins.early_stopping: metric: there is no '{self.metric}'; there are: "
                f"{', '.join(metrics)}"
            )
        self.waited += 1
        if self._improves(value := float(metrics[self.metric])):
            self.best_value, self.best_step, self.waited = value, step, 0
        self._stop_if_due(run)

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        """Keep the best value in checkpoints, so that a resumed run stops at the same step."""
        return {"value": self.best_value, "step": self.best_step, "waited": self.waited}

    @hookimpl
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value and the count."""
        self.best_value, self.best_step = state["value"], state["step"]
        self.waited = state["waited"]

    @hookimpl
    def summary(self) -> str:
        """Report the best value and its step."""
        return self.result

    @property
    def _of_evaluations(self) -> bool:
        return self.metric.startswith("eval_")

    def _improves(self, value: float) -> bool:
        if self.best_value is None or not math.isfinite(value):
            return math.isfinite(value)
        decrease = self.best_value - value
        return (decrease if self.best != "highest" else -decrease) > self.min_delta

    def _stop_if_due(self, run: Run) -> None:
        if self.best_value is not None:
            best = f"best {self.metric} {self.best_value:.4g} at step {self.best_step}"
        else:
            best = f"no finite {self.metric}"
        self.result = best if self.waited or self.best_value is not None else ""
        if self.waited >= self.patience and run.step < run.steps:
            unit = "evaluation" if self._of_evaluations else "step"
            more = f" by more than {self.min_delta:g}" if self.min_delta else ""
            waited = f"{self.waited} {unit}{'s' * (self.waited > 1)}"
            run.stop(f"{self.metric} did not improve{more} in {waited}; {best}")
