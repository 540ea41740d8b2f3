"""Learning-rate schedules: pure functions of the step, so that resuming needs no state.

They have the names, options and values of those of transformers. Importing these takes a second,
because they come with its trainer and with peft.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError, validate_call

from ..base.checksums import digest
from ..base.errors import PluginError, RecipeError, choices
from ..hooks import hookimpl
from ..recipe.tables import Train, short

if TYPE_CHECKING:
    from torch.optim import Optimizer

Factor = Callable[[int], float]
"""Step, counted from 0 -> share of the peak learning rate."""
Curve = Callable[[float], float]
Shape = Literal["linear", "cosine", "1-sqrt"]


class Schedule:
    """Sets the learning rate of each step."""

    def __init__(self, factor: Factor, optimizer: Optimizer, steps: int) -> None:
        self._factors, self._optimizer = factors_of(factor, steps), optimizer
        self._peaks = [group["lr"] for group in optimizer.param_groups]

    def facts(self) -> dict[str, str]:
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
        return schedule_factor(train, steps)


def factors_of(factor: Any, steps: int) -> list[float]:
    """Return the factor of each step; refuse those of a plugin that are no learning rates."""
    if not callable(factor):
        raise PluginError(
            f"'schedule' gave {short(factor)}; it returns a function: the step, counted from 0 -> "
            "the share of the peak learning rate"
        )
    factors = [factor(step) for step in range(steps)]
    for step, value in enumerate(factors, start=1):
        if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
            raise PluginError(
                f"'schedule' gave {short(value)} for step {step}; it returns a share of the peak "
                "learning rate, which is a finite number of at least 0"
            )
    return [float(value) for value in factors]


class Steps(NamedTuple):
    """The steps of a run, and its peak learning rate."""

    total: int
    warmup: int
    peak: float

    def progress(self, step: int) -> float:
        """Return the share of the steps after the warm-up that is done."""
        return (step - self.warmup) / max(1, self.total - self.warmup)


def check_schedule(train: Train) -> None:
    """Refuse options that the schedule does not take."""
    if train.warmup and train.schedule == "constant":
        raise RecipeError(
            f"train.warmup: given {train.warmup:g}, but the schedule 'constant' has no warm-up; "
            'set train.schedule = "constant_with_warmup"'
        )
    schedule_factor(train, train.steps or 100)


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
    """Return the recipe's schedule of a run of `total` steps."""
    steps = Steps(total, warmup_steps(train, total), train.learning_rate)
    schedule, options = SCHEDULES[train.schedule], train.schedule_options
    try:
        return validate_call(schedule)(steps, **options)
    except ValidationError as error:
        names = list(inspect.signature(schedule).parameters)[1:]
        raise RecipeError(
            [_explain(train.schedule, names, dict(one)) for one in error.errors()]
        ) from error
    except ValueError as error:
        raise RecipeError(
            f"train.schedule_options: given {options}; the schedule '{train.schedule}' {error}"
        ) from error


def _explain(schedule: str, names: list[str], error: dict[str, object]) -> str:
    """Say what is wrong with an option of a schedule."""
    location = error["loc"]
    option = str(location[-1] if isinstance(location, tuple) else location)
    where = f"train.schedule_options.{option}: the schedule '{schedule}'"
    if error["type"] == "missing_keyword_only_argument":
        return f"{where} needs it"
    if error["type"] == "unexpected_keyword_argument":
        return f"{where} has no such option{choices(option, names, 'it has:')}"
    return f"{where}: given {error['input']!r}; {error['msg']}"


def constant(steps: Steps) -> Factor:
    """Stay at the peak."""
    return lambda step: 1.0


def constant_with_warmup(steps: Steps) -> Factor:
    """Stay at the peak after the warm-up."""
    return _after_warmup(steps, lambda step: 1.0)


def linear(steps: Steps) -> Factor:
    """Fall to 0 on a line."""
    length = max(1, steps.total - steps.warmup)
    return _after_warmup(steps, lambda step: max(0.0, (steps.total - step) / length))


def cosine(steps: Steps, *, num_cycles: float = 0.5) -> Factor:
    """Fall to 0 on half a cosine."""
    return _after_warmup(steps, lambda step: max(0.0, _cosine(steps.progress(step), num_cycles)))


def cosine_with_restarts(steps: Steps, *, num_cycles: PositiveInt = 1) -> Factor:
    """Fall to 0 on half a cosine, several times."""

    def decay(step: int) -> float:
        progress = steps.progress(step)
        return 0.0 if progress >= 1 else _cosine((num_cycles * progress) % 1.0, 0.5)

    return _after_warmup(steps, decay)


def cosine_with_min_lr(
    steps: Steps,
    *,
    num_cycles: float = 0.5,
    min_lr: NonNegativeFloat | None = None,
    min_lr_rate: NonNegativeFloat | None = None,
) -> Factor:
    """Fall to a smallest learning rate, or to a share of the peak, on half a cosine."""
    if (min_lr is None) == (min_lr_rate is None):
        raise ValueError("needs either min_lr or min_lr_rate")
    if min_lr and not steps.peak:
        raise ValueError("needs min_lr_rate where train.learning_rate is 0")
    floor = min_lr_rate or (min_lr / steps.peak if min_lr else 0.0)

    def decay(step: int) -> float:
        return max(0.0, _cosine(steps.progress(step), num_cycles) * (1 - floor) + floor)

    return _after_warmup(steps, decay)


def polynomial(steps: Steps, *, lr_end: NonNegativeFloat = 1e-7, power: float = 1.0) -> Factor:
    """Fall to `lr_end` as a power of the steps that are left."""
    if steps.peak <= lr_end:
        raise ValueError(f"needs lr_end < train.learning_rate; lr_end is {lr_end:g}")

    def decay(step: int) -> float:
        left = max(0.0, 1 - steps.progress(step))
        return float(((steps.peak - lr_end) * left**power + lr_end) / steps.peak)

    return _after_warmup(steps, decay)


def inverse_sqrt(steps: Steps, *, timescale: PositiveInt | None = None) -> Factor:
    """Fall with the root of the step."""
    scale = timescale or steps.warmup or 10_000
    return _after_warmup(steps, lambda step: 1 / math.sqrt((step + scale - steps.warmup) / scale))


def warmup_stable_decay(
    steps: Steps,
    *,
    num_decay_steps: NonNegativeInt,
    num_stable_steps: NonNegativeInt | None = None,
    warmup_type: Shape = "linear",
    decay_type: Shape = "cosine",
    min_lr_ratio: NonNegativeFloat = 0.0,
    num_cycles: float = 0.5,
) -> Factor:
    """Rise, stay at the peak, and fall in the last `num_decay_steps`."""
    stable = num_stable_steps
    if stable is None:
        stable = steps.total - steps.warmup - num_decay_steps
    decay_from = steps.warmup + stable
    rises: dict[str, Curve] = {
        "linear": lambda share: share,
        "cosine": lambda share: 0.5 * (1.0 - math.cos(math.pi * share)),
        "1-sqrt": lambda share: 1.0 - math.sqrt(1.0 - share),
    }
    falls: dict[str, Curve] = {
        "linear": lambda share: 1.0 - share,
        "cosine": lambda share: _cosine(share, num_cycles),
        "1-sqrt": lambda share: 1.0 - math.sqrt(share),
    }

    def factor(step: int) -> float:
        if steps.warmup <= step < decay_from:
            return 1.0
        if step >= decay_from + num_decay_steps:
            return min_lr_ratio
        if step < steps.warmup:
            share = rises[warmup_type](step / max(1, steps.warmup))
        else:
            share = falls[decay_type]((step - decay_from) / max(1, num_decay_steps))
        return max(0.0, share * (1.0 - min_lr_ratio) + min_lr_ratio)

    return factor


SCHEDULES: dict[str, Callable[..., Factor]] = {
    schedule.__name__: schedule
    for schedule in (
        constant,
        constant_with_warmup,
        linear,
        cosine,
        cosine_with_restarts,
        cosine_with_min_lr,
        polynomial,
        inverse_sqrt,
        warmup_stable_decay,
    )
}


def _after_warmup(steps: Steps, decay: Factor) -> Factor:
    """Rise on a line over the warm-up's steps, then decay."""
    return lambda step: step / max(1, steps.warmup) if step < steps.warmup else decay(step)


def _cosine(progress: float, cycles: float) -> float:
    """Return a cosine that starts at 1 and is 0 after half a cycle."""
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))
