"""The learning rate as a function of the step; resuming needs no state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers

from ..base.errors import RecipeError
from ..recipe.tables import Train

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Schedule:
    """Sets the learning rate of each step."""

    def __init__(self, train: Train, optimizer: Optimizer, steps: int) -> None:
        import torch

        warmup = round(train.warmup * steps if train.warmup < 1 else train.warmup)
        # transformers' schedules need an optimizer of torch, and the run's may be DeepSpeed's. This
        # one never steps; only the function of the step is used.
        unused = torch.optim.SGD([torch.zeros(1)], lr=train.learning_rate)
        try:
            # Imported by its own name: its module imports peft, which takes seconds.
            self._factor = transformers.get_scheduler(
                train.schedule,
                unused,
                num_warmup_steps=warmup,
                num_training_steps=steps,
                scheduler_specific_kwargs=dict(train.schedule_options),
            ).lr_lambdas[0]
            self._factor(steps)
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"train.schedule_options: given {train.schedule_options}; the schedule "
                f"'{train.schedule}' does not take them: {error}"
            ) from error
        self._optimizer = optimizer
        self._peaks = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        """Set the learning rate of a step, counted from 1; return it."""
        factor = float(self._factor(step - 1))
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return float(self._peaks[0]) * factor


NEED_OPTIONS = ("cosine_with_min_lr", "warmup_stable_decay")


def check_schedule(train: Train) -> None:
    """Refuse options that the schedule does not take."""
    # Creating any optimizer imports torch's compiler, which takes most of a second.
    if train.schedule_options or train.schedule in NEED_OPTIONS:
        import torch

        Schedule(
            train, torch.optim.SGD([torch.zeros(1)], lr=train.learning_rate), train.steps or 100
        )
