"""Train with schedule-free AdamW (arXiv 2405.15682): affects results."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from plugsft import Recipe, RecipeError, Run, Train, hookimpl, plugin, state

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

COUNTERS = "k", "weight_sum", "lr_max", "scheduled_lr"
"""What the optimizer counts beside the states of weights."""


@plugin(affects_results=["warmup_steps"])
class ScheduleFree:
    """Train with schedule-free AdamW: affects results.

    Its average of the weights is evaluated and saved; checkpoints hold the weights it trains.
    """

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises."""

    adamw: Any = state()

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse a schedule, and settings without an average."""
        if recipe.train.schedule != "constant":
            raise RecipeError('it replaces the schedule: set train.schedule = "constant"')
        if recipe.train.beta1 == 0:
            raise RecipeError("train.beta1 = 0 leaves no average; set it to 0.9")

    @hookimpl
    def optimizer(self, model: Module, train: Train) -> Optimizer:
        """Make the optimizer, in training mode."""
        from schedulefree import AdamWScheduleFree

        self.adamw = AdamWScheduleFree(
            [weight for weight in model.parameters() if weight.requires_grad],
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            warmup_steps=self.warmup_steps,
        )
        self.adamw.train()
        return self.adamw

    @hookimpl(wrapper=True)
    def use_weights(self, run: Run) -> Generator[None, Any, Any]:
        """Evaluate, generate and save with the average."""
        # The optimizer's own way back rounds the weights; `swapped` puts back the very bits.
        with run.model.swapped(run.model.shards()):
            self.adamw.eval()
            try:
                return (yield)
            finally:
                self.adamw.train()

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        """Keep what the optimizer counts in its parameter groups."""
        [group] = self.adamw.param_groups
        return {key: group[key] for key in COUNTERS}

    @hookimpl
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        [group] = self.adamw.param_groups
        group.update(state)
