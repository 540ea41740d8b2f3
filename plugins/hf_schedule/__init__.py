"""Follow another learning-rate schedule of transformers: affects results."""

from collections.abc import Callable
from dataclasses import field
from typing import Literal

from pydantic import JsonValue

from plugsft import Recipe, RecipeError, Train, hookimpl, plugin


@plugin(affects_results=["name", "options"])
class HfSchedule:
    """Follow another learning-rate schedule of transformers: affects results.

    It takes the place of `train.schedule`, with the peak of `train.learning_rate` and the warm-up
    of `train.warmup`. Schedules that look at metrics are refused: rates depend on the step alone.
    """

    name: Literal[
        "cosine",
        "cosine_warmup_with_min_lr",
        "cosine_with_min_lr",
        "cosine_with_restarts",
        "inverse_sqrt",
        "linear",
        "polynomial",
        "warmup_stable_decay",
    ]
    """The schedule, as in transformers."""
    options: dict[str, JsonValue] = field(default_factory=dict)
    """Its options in transformers: `{power = 2.0}` for polynomial."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse options that the schedule does not take, and another schedule in [train]."""
        train = recipe.train
        if train.schedule != "linear" or train.final_rate is not None:
            raise RecipeError("it replaces train.schedule; remove that, with decay and final_rate")
        self.schedule(train, train.steps or 100)

    @hookimpl
    def schedule(self, train: Train, steps: int) -> Callable[[int], float]:
        """Return the curve of transformers."""
        from .curve import curve_of

        return curve_of(self.name, self.options, train, steps)
