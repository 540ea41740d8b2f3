"""Refuses settings of the recipe that a plugin's optimizer does not use."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ..base.errors import RecipeError
from ..recipe.tables import Train
from .optimizer_parts import optimizers_in

SETTINGS = ("beta1", "beta2", "eps", "weight_decay")
"""Settings of [train] that the core's AdamW uses, and another optimizer may not."""


def ensure_uses_settings(optimizer: Optimizer, train: Train, plugins: Sequence[str]) -> None:
    """Refuse settings that no parameter group holds; `plugins` made or changed the optimizer.

    Settings at their defaults are not looked for.
    """
    groups = [group for part in optimizers_in(optimizer) for group in part.param_groups]
    made_by = " and ".join(f"plugin '{name}'" for name in plugins)
    problems = [
        f"remove train.{key} = {value}: the optimizer of {made_by} does not use it (no parameter "
        f"group of {type(optimizer).__name__} has this value as {_name_in_groups(key)})"
        for key in SETTINGS
        if (value := getattr(train, key)) != Train.model_fields[key].default
        and not any(_holds(group, key, value) for group in groups)
    ]
    if problems and plugins:
        raise RecipeError(problems)


def _holds(group: Mapping[str, Any], key: str, value: float) -> bool:
    """Tell whether a parameter group holds a setting, named as in torch."""
    slices = {"beta1": slice(0, 1), "beta2": slice(1, 2)}
    numbers = group.get("betas", ())[slices[key]] if key in slices else group.get(key)
    # Adafactor has two values of eps, the first of them None.
    items = numbers if isinstance(numbers, list | tuple) else [numbers]
    return any(n is not None and math.isclose(float(n), value, rel_tol=1e-6) for n in items)


def _name_in_groups(key: str) -> str:
    return {"beta1": "betas[0]", "beta2": "betas[1]"}.get(key, f"'{key}'")
