"""Takes a curve from transformers."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import get_scheduler

from plugsft import RecipeError, Train


def curve_of(
    name: str, options: dict[str, Any], train: Train, steps: int
) -> Callable[[int], float]:
    """Return the function of a schedule; refuse what transformers refuses."""
    optimizer = torch.optim.SGD([torch.zeros(1)], train.learning_rate)
    warmup = train.steps_of(train.warmup, steps)
    try:
        curve: Callable[[int], float]
        [curve] = get_scheduler(name, optimizer, warmup, steps, options).lr_lambdas
        curve(steps - 1)
    except Exception as error:  # transformers has various kinds
        # With its key, for `check` asks for the curve, too.
        where = "plugins.hf_schedule.options"
        raise RecipeError(f"{where}: {name} of transformers refuses them: {error}") from error
    return curve
