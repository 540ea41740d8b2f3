"""Learning-rate schedules: pure functions of the step, so that resuming needs no state.

They have the names, options and values of those of transformers. Importing these takes two seconds,
because they come with its trainer and with peft, and torch, without which a recipe is checked.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    validate_call,
)

from ..base.checksums import digest
from ..base.errors import PluginError, RecipeError, choices
from ..hooks import hookimpl
from ..recipe.tables import Train, short

if TYPE_CHECKING:
    from torch.optim import Optimizer

Factor = Callable[[int], float]
"""Steps done before -> share of the peak learning rate. So a warm-up begins with the rate 0."""
Shape = Literal["linear", "cosine", "1-sqrt"]


class Schedule:
    """Sets the learning rate of each step."""

    def __init__(self, factor: Factor, optimizer: Optimizer, steps: int) -> None:
        self._factors, self._optimizer = factors_of(factor, steps), optimizer
        self._peaks = [group["lr"] for group in optimizer.param_groups]

    def compared(self) -> dict[str, str]:
        """Describe the learning rates, to compare ranks."""
        return {
            "the learning rates": digest(
                {"factors": self._factors, "peaks": [*map(float, self._peaks)]}
            )[:8]
        }

    def scale_factors(self, train: Train) -> None:
        """Scale the learning rates after the steps at which the recipe changes their peak."""
        steps, changes = len(self._factors), sorted(map(int, train.learning_rate_after))
        if changes and (changes[-1] >= steps or not train.learning_rate):
            raise RecipeError(
                f"train.learning_rate_after.{changes[-1]}: no learning rate follows that could "
                "change"
            )
        for done in range(min(changes, default=steps), steps):
            self._factors[done] *= train.peak_after(done) / train.learning_rate

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
        return schedule_factor(train, steps)


def factors_of(factor: Factor, steps: int) -> list[float]:
    """Return the factor of each step; refuse those of a plugin that are no learning rates."""
    factors = [factor(step) for step in range(steps)]
    for step, value in enumerate(factors, start=1):
        if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
            raise PluginError(
                f"'schedule' gave {short(value)} for step {step}; it returns a share of the peak "
                "learning rate, which is a finite number of at least 0"
            )
    return [float(value) for value in factors]


class Point(NamedTuple):
    """A step in a run."""

    done: int
    """Steps before it."""
    total: int
    warmup: int
    peak: float
    """The peak learning rate."""

    @property
    def progress(self) -> float:
        """The share of the steps after the warm-up that is done; asked for after it only."""
        return (self.done - self.warmup) / (self.total - self.warmup)


def warmup_steps(train: Train, total: int) -> int:
    """Count the steps of the warm-up as transformers' Trainer does: a share rounds up."""
    return math.ceil(train.warmup * total) if train.warmup < 1 else int(train.warmup)


def long_warmup(train: Train, total: int) -> str:
    """Return a warning if the warm-up ends no earlier than the run."""
    warmup = warmup_steps(train, total)
    if warmup < total:
        return ""
    return (
        f"the warm-up takes {warmup:,} of {total:,} steps, so the learning rate never reaches "
        "train.learning_rate; lower train.warmup"
    )


def schedule_factor(train: Train, total: int) -> Factor:
    """Make the recipe's schedule for a run of `total` steps; refuse options that it lacks."""
    curve, options = CURVES[train.schedule], train.schedule_options
    start = Point(0, max(1, total), 0, train.learning_rate)
    try:
        validate_call(config={"strict": True})(curve)(start, **options)
    except ValidationError as error:
        names = list(inspect.signature(curve).parameters)[1:]
        raise RecipeError(
            [_explain(train.schedule, names, dict(one)) for one in error.errors()]
        ) from error
    except ValueError as error:
        raise RecipeError(
            f"train.schedule_options: given {options}; the schedule '{train.schedule}' {error}"
        ) from error
    warmup = warmup_steps(train, total)
    # Constant has no warm-up; warmup_stable_decay rises by itself.
    rises = train.schedule not in ("constant", "warmup_stable_decay")

    def factor(done: int) -> float:
        if rises and done < warmup:
            return done / warmup
        return curve(Point(done, total, warmup, train.learning_rate), **options)

    return factor


def _explain(schedule: str, names: list[str], error: dict[str, Any]) -> str:
    """Say what is wrong with an option of a schedule."""
    option = str(error["loc"][-1])
    where = f"train.schedule_options.{option}: the schedule '{schedule}'"
    if error["type"] == "missing_keyword_only_argument":
        return f"{where} needs it"
    if error["type"] == "unexpected_keyword_argument":
        return f"{where} has no such option{choices(option, names, 'it has:')}"
    return f"{where}: given {error['input']!r}; {error['msg']}"


# The curves, from the end of the warm-up on.


def constant(point: Point) -> float:
    """Stay at the peak."""
    return 1.0


def linear(point: Point) -> float:
    """Fall to 0 on a line."""
    return (point.total - point.done) / (point.total - point.warmup)


def cosine(point: Point, *, num_cycles: float = 0.5) -> float:
    """Fall to 0 on half a cosine."""
    return half_cosine(point.progress, num_cycles)


def cosine_with_restarts(point: Point, *, num_cycles: PositiveInt = 1) -> float:
    """Fall to 0 on half a cosine, several times."""
    return half_cosine((num_cycles * point.progress) % 1.0)


def cosine_with_min_lr(
    point: Point,
    *,
    num_cycles: float = 0.5,
    min_lr: NonNegativeFloat | None = None,
    min_lr_rate: NonNegativeFloat | None = None,
) -> float:
    """Fall to a smallest learning rate, or to a share of the peak, on half a cosine."""
    if (min_lr is None) == (min_lr_rate is None) or (min_lr and not point.peak):
        raise ValueError("needs either min_lr or min_lr_rate (where learning_rate is 0, the rate)")
    floor = min_lr_rate or (min_lr / point.peak if min_lr else 0.0)
    if floor > 1:
        raise ValueError("needs a smallest learning rate that is no more than the peak")
    return half_cosine(point.progress, num_cycles) * (1 - floor) + floor


def polynomial(point: Point, *, lr_end: NonNegativeFloat = 1e-7, power: float = 1.0) -> float:
    """Fall to `lr_end` as a power of the steps that are left."""
    if point.peak <= lr_end:
        raise ValueError(f"needs lr_end < train.learning_rate; lr_end is {lr_end:g}")
    left: float = (1 - point.progress) ** power
    return ((point.peak - lr_end) * left + lr_end) / point.peak


def inverse_sqrt(point: Point, *, timescale: PositiveInt | None = None) -> float:
    """Fall with the root of the step."""
    scale = timescale or point.warmup or 10_000
    return 1 / math.sqrt((point.done + scale - point.warmup) / scale)


def warmup_stable_decay(
    point: Point,
    *,
    num_decay_steps: NonNegativeInt,
    num_stable_steps: NonNegativeInt | None = None,
    warmup_type: Shape = "linear",
    decay_type: Shape = "cosine",
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Rise, stay at the peak, and fall in the last `num_decay_steps`."""
    done, fall = point.done, point.total - num_decay_steps
    if num_stable_steps is not None:
        fall = point.warmup + num_stable_steps
    share = 0.0
    if done < point.warmup:
        share = RISES[warmup_type](done / point.warmup)
    elif done < fall:
        return 1.0
    elif done < fall + num_decay_steps:
        share = FALLS[decay_type]((done - fall) / num_decay_steps, num_cycles)
    return share * (1.0 - min_lr_ratio) + min_lr_ratio


def half_cosine(share: float, cycles: float = 0.5) -> float:
    """Fall from 1 to 0 over the first half of a cycle."""
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * share))


RISES: dict[str, Callable[[float], float]] = {
    "linear": lambda share: share,
    "cosine": lambda share: 0.5 * (1.0 - math.cos(math.pi * share)),
    "1-sqrt": lambda share: 1.0 - math.sqrt(1.0 - share),
}
FALLS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda share, cycles: 1.0 - share,
    "cosine": half_cosine,
    "1-sqrt": lambda share, cycles: 1.0 - math.sqrt(share),
}
CURVES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "constant_with_warmup": constant,
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "cosine_with_min_lr": cosine_with_min_lr,
    "polynomial": polynomial,
    "inverse_sqrt": inverse_sqrt,
    "warmup_stable_decay": warmup_stable_decay,
}
