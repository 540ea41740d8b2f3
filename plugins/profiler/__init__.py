"""Measure the parts of a step, name bottlenecks, and the recipe lines that remove them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from plugsft import Batch, LoadedStep, Machine, Recipe, RecipeError, Run, hookimpl, plugin, state

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from plugsft.data_kit import Tokens


@plugin(after=["*"], provides={"traced_steps": "trace"})
class Profiler:
    """Measure the parts of a step, name bottlenecks, and the recipe lines that remove them.

    The figures of every rank go into OUTPUT/profile.json.
    """

    trace: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Steps to trace. OUTPUT/profile/ gets a file per step and rank, for ui.perfetto.dev. Traced
    steps are left out of the figures."""

    recipe: Recipe = state()
    machine: Machine = state()
    recorder: Any = state()
    """Measures the steps, once the model is loaded."""
    result: str = state("")

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Remember the recipe and the machine."""
        self.recipe, self.machine = recipe, machine

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Module, Module]:
        """Read the model's shapes, which give the floating-point operations."""
        from .recorder import StepRecorder

        model = yield
        self.recorder = StepRecorder(self.recipe, self.machine, self.trace, model)
        return model

    @hookimpl(wrapper=True)
    def optimizer(self) -> Generator[None, Optimizer, Optimizer]:
        """Mark the beginning and end of each optimizer step."""
        optimizer = yield
        optimizer.register_step_pre_hook(lambda *_: self.recorder.clock.mark("norm"))
        optimizer.register_step_post_hook(lambda *_: self.recorder.clock.mark("optimizer"))
        return optimizer

    @hookimpl(wrapper=True)
    def add_columns(self) -> Generator[None, Tokens, Tokens]:
        """Keep the training data, whose lengths give the floating-point operations."""
        tokens = yield
        # Training data comes before evaluation data.
        self.recorder.tokens = self.recorder.tokens or tokens
        return tokens

    @hookimpl(wrapper=True)
    def load_batches(self) -> Generator[None, Iterator[LoadedStep], Iterator[LoadedStep]]:
        """Mark when the loop asks for a global batch, and when it gets one."""
        feed = yield
        result: Iterator[LoadedStep] = self.recorder.record_steps(feed)
        return result

    @hookimpl(wrapper=True)
    def step(self, batch: Batch) -> Generator[None, Tensor, Tensor]:
        """Mark the beginning and end of a forward, and the end of its backward."""
        loss: Tensor = yield from self.recorder.record_micro_batch(batch)
        return loss

    @hookimpl
    def add_metrics(self) -> dict[str, Tensor]:
        """Mark the end of the last backward; exchange the figures of all ranks now and then."""
        self.recorder.end_backward()
        return {}

    @hookimpl
    def ready(self, run: Run) -> None:
        """Refuse trace steps beyond the last."""
        if missing := [step for step in self.trace if step > run.steps]:
            raise RecipeError(
                f"plugins.profiler.trace: step {missing[0]} does not exist; "
                f"the run has {run.steps} steps"
            )

    @hookimpl
    def logged(self, metrics: dict[str, Any]) -> None:
        """Mark the end of logging, or of an evaluation."""
        self.recorder.clock.mark("evaluation" if "eval_loss" in metrics else "logging")

    @hookimpl
    def saved(self, kind: str) -> None:
        """Mark the end of saving a checkpoint."""
        if kind == "checkpoint":
            self.recorder.clock.mark("checkpoint")

    @hookimpl
    def finished(self, run: Run) -> None:
        """Print and write the profile."""
        from .bottlenecks import summarize

        if run.is_main and self.recorder.steps:
            self.result = summarize(self.recorder, run.facts)

    @hookimpl
    def summary(self) -> str:
        """Report the seconds of a step, and the share of each part."""
        return self.result
