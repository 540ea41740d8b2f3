"""Learning-rate schedules: pure functions of the step, so that resuming needs no state.

Their values are those of transformers. Importing its own takes two seconds, because they come with
its trainer and with peft, and torch, without which a recipe is checked. So a plugin has its others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING

from ..base.checksums import digest
from ..base.errors import PluginError, reason_of
from ..hooks import hookimpl
from ..recipe.tables import Train, short

if TYPE_CHECKING:
    from torch.optim import Optimizer

Factor = Callable[[int], float]
"""Steps done before -> share of the peak learning rate. So a warm-up begins with the rate 0."""


class Schedule:
    """Sets the learning rate of each step."""

    def __init__(self, factors: list[float], optimizer: Optimizer) -> None:
        self._factors = factors
        self._optimizer = optimizer
        self._peaks = [group["lr"] for group in optimizer.param_groups]

    def compared(self) -> dict[str, str]:
        """Describe the learning rates, to compare ranks."""
        return {
            "the learning rates": digest(
                {"factors": self._factors, "peaks": [*map(float, self._peaks)]}
            )[:8]
        }

    def set(self, step: int) -> float:
        """Set the learning rate of a step, counted from 1; return it."""
        factor = self._factors[step - 1]
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return float(self._peaks[0]) * factor


class ScheduleDefaults:
    """The core's answer to the hook `schedule`. It needs no torch."""

    @hookimpl
    def schedule(self, train: Train, steps: int) -> Factor:
        """Follow the recipe's schedule."""
        warmup, final = train.steps_of(train.warmup, steps), train.final_rate or 0.0
        first, decay = 0.0, steps - warmup
        if train.decay:  # of "wsd", whose warm-up begins with the final rate, as in transformers
            first, decay = final, train.steps_of(train.decay, steps)

        def factor(done: int) -> float:
            if done < warmup:
                return first + (1 - first) * done / warmup
            left = steps - done
            if left > decay or train.schedule == "constant":
                return 1.0
            share = left / decay
            if train.schedule == "cosine":
                share = 0.5 * (1 + math.cos(math.pi * ((decay - left) / decay)))
            return final + (1 - final) * share

        return factor


def factors_of(factor: Factor, steps: int, where: str = "'schedule'") -> list[float]:
    """Return the factor of each step; refuse those of a plugin that are no learning rates.

    `where` names the hook and its plugins.
    """
    factors: list[float] = []
    for done in range(steps):
        try:
            value = factor(done)
        except Exception as error:
            raise PluginError(
                f"{where} gave a function that fails for step {done + 1} ({reason_of(error)}); it "
                "is called with the number of steps done before"
            ) from error
        if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
            raise PluginError(
                f"{where} gave {short(value)} for step {done + 1}; it returns a share of the "
                "peak learning rate, which is a finite number of at least 0"
            )
        factors.append(float(value))
    return factors


def without_peak(train: Train, steps: int) -> str:
    """Return a warning if the warm-up and the decay leave no step at the peak."""
    taken = train.steps_of(train.warmup, steps) + train.steps_of(train.decay or 1, steps)
    if taken <= steps:
        return ""
    keys = "train.warmup or train.decay" if train.decay else "train.warmup"
    return f"none of the {steps:,} steps reaches train.learning_rate; lower {keys}"
