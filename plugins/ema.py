"""Evaluate and save an exponential moving average of the weights: affects results."""

from collections.abc import Generator
from typing import Annotated, Any

from pydantic import Field

from plugsft import Run, WeightSlice, hookimpl, plugin, state


@plugin(affects_results=["enabled", "decay"])
class Ema:
    """Evaluate and save an exponential moving average of the weights: affects results.

    Training itself is unchanged. Evaluations, generation and `model/` use the average; checkpoints
    have the trained weights too. It takes 4 bytes per trained weight, sharded like the model.
    Evaluations copy the trained weights, usually into memory that the gradients have freed.
    """

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the old average that each step keeps."""

    average: dict[str, Any] = state({})
    """This rank's part of each averaged weight, in float32."""
    steps: int = state(0)
    """The number of steps in the average."""

    @hookimpl
    def ready(self, run: Run) -> None:
        """Start from the current weights, unless the checkpoint had an average."""
        if not self.average:
            self.average = {name: part.clone() for name, part in run.model.shards().items()}

    @hookimpl
    def stepped(self, run: Run) -> None:
        """Move the average towards the new weights."""
        self.steps += 1
        for name, part in run.model.shards().items():
            self.average[name].lerp_(part, 1 - self.decay)

    @hookimpl(wrapper=True)
    def use_weights(self, run: Run) -> Generator[None, Any, Any]:
        """Evaluate, generate and save with the average in place of the trained weights."""
        with run.model.swapped(self.average):
            return (yield)

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        """Keep the average in checkpoints; it is resharded like the weights."""
        average = {name: WeightSlice(name, part) for name, part in self.average.items()}
        return {"average": average, "steps": self.steps}

    @hookimpl
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average of a checkpoint."""
        self.average = {name: part.values for name, part in state["average"].items()}
        self.steps = state["steps"]

    @hookimpl
    def summary(self) -> str | None:
        """Report the size of the average."""
        if not self.average:
            return None
        gib = sum(part.nbytes for part in self.average.values()) / 2**30
        return f"model/ is an average over {self.steps} steps; {gib:.2f} GiB on each rank"
