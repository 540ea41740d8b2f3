"""The parts of an optimizer in checkpoints: its groups' settings and counters, states, inner ones.

Settings of the recipe that a plugin's optimizer does not use are refused.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import CheckpointError, RecipeError
from ..recipe.tables import Train
from .states import STATES, Describer, Restorer

SCHEDULED = "lr"
"""The value that the schedule sets before each step."""
PLAIN = bool | int | float | str | None
"""Types of an optimizer's attributes that are stored; others may be parts of the model."""
SETTINGS = ("beta1", "beta2", "eps", "weight_decay")
"""Settings of [train] that the core's AdamW uses, and another optimizer may not."""


Values = dict[str, Any]


def describe_values(describer: Describer, optimizer: Optimizer, folder: str = STATES) -> Values:
    """Describe the values of an optimizer's parameter groups, and its plain attributes."""
    groups = [
        {
            key: describer.value(value, f"{folder}/groups/{number}/{key}")
            for key, value in group.items()
            if key != "params"
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    attributes = {k: value for k, value in vars(optimizer).items() if isinstance(value, PLAIN)}
    return {"groups": groups, "attributes": attributes}


def restore_values(
    restorer: Restorer, saved: Mapping[str, Any], optimizer: Optimizer, now: Mapping[str, Any]
) -> None:
    """Restore the values of an optimizer, except settings that the user has changed.

    `now` describes the values before training. A setting that the user has changed since the
    checkpoint stays changed, unless training changes it too.
    """
    groups = optimizer.param_groups
    if len(saved["groups"]) != len(groups):
        raise CheckpointError(
            f"{restorer.reader.folder}: {restorer.optimizer} had {len(saved['groups'])} parameter "
            f"groups and has {len(groups)}; make the same groups again"
        )
    for number, group in enumerate(groups):
        values, then = saved["groups"][number], saved["initial"][number]
        where = f" of parameter group {number}"
        _restore(restorer, values, group, then, now["groups"][number], where)
    values, then = saved["attributes"], saved["initial_attributes"]
    _restore(restorer, values, vars(optimizer), then, now["attributes"], "")


def _restore(
    restorer: Restorer, saved: Values, current: Values, then: Values, now: Values, where: str
) -> None:
    for key, value in saved.items():
        if key == SCHEDULED or _has_object(value):
            continue
        if _equal(then.get(key), now.get(key)):
            restored = restorer.value(value, f"'{key}'{where}")
            current[key] = _assign(restored, current.get(key))
        elif not _equal(value, then.get(key)):
            raise CheckpointError(
                f"{restorer.reader.folder}: {restorer.optimizer}'s '{key}'{where} changes in "
                f"training; its initial value was {then.get(key)!r} and is {now.get(key)!r} now; "
                "undo that change"
            )


def _assign(value: Any, current: Any) -> Any:
    """Return the new value, in the current object if possible: groups may share it."""
    if type(value) is not type(current):
        return value
    if isinstance(value, Tensor) and (value.shape, value.dtype) == (current.shape, current.dtype):
        return current.copy_(value)
    if isinstance(value, list):
        current[:] = value
        return current
    if isinstance(value, dict):
        current.clear()
        current.update(value)
        return current
    return value


def _equal(first: Any, second: Any) -> bool:
    """Compare two descriptions; NaN equals NaN."""
    return json.dumps(first) == json.dumps(second)


def _has_object(description: Any) -> bool:
    """Tell whether a value has an object in it, which only the optimizer can build."""
    if isinstance(description, list):
        return any(map(_has_object, description))
    if not isinstance(description, Mapping):
        return False
    return "object" in description or any(map(_has_object, description.values()))


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer, and those that it calls and that have states of their own."""
    inner = [
        item
        for attribute in vars(optimizer).values()
        for item in _items(attribute)
        if isinstance(item, Optimizer) and item.state is not optimizer.state
    ]
    return [optimizer, *(found for item in inner for found in optimizers_in(item))]


def _items(attribute: Any) -> list[Any]:
    if isinstance(attribute, Mapping):
        return [*attribute.values()]
    return [*attribute] if isinstance(attribute, list | tuple) else [attribute]


def describe_optimizer(
    describer: Describer,
    optimizer: Optimizer,
    states: dict[str, Any],
    initial: dict[str, Any],
    folder: str = STATES,
) -> dict[str, Any]:
    """Describe an optimizer; `states` and `initial` describe its states and first values."""
    return {
        "class": type(optimizer).__name__,
        "states": states,
        **describe_values(describer, optimizer, folder),
        "initial": initial["groups"],
        "initial_attributes": initial["attributes"],
        "shared": describer.shared(optimizer, folder),
        "extra": describer.extra(optimizer, folder),
    }


def describe_states(
    describer: Describer, optimizer: Optimizer, named: Mapping[str, Any], folder: str = STATES
) -> dict[str, Any]:
    """Describe the states of parameters."""
    return {
        name: {
            key: describer.value(value, f"{folder}/{name}/{key}", parameter)
            for key, value in state.items()
        }
        for name, parameter in named.items()
        if (state := optimizer.state.get(parameter))
    }


def restore_states(
    restorer: Restorer, optimizer: Optimizer, named: Mapping[str, Any], states: Mapping[str, Any]
) -> None:
    """Restore the states of parameters."""
    if strange := {*states} - {*named}:
        raise restorer.reader.mismatch(f"{STATES}/{min(strange)}")
    for name, parameter in named.items():
        optimizer.state.pop(parameter, None)
        if name in states:
            optimizer.state[parameter] = {
                key: restorer.value(value, state_name(name, key), parameter)
                for key, value in states[name].items()
            }


def state_name(name: str, key: str) -> str:
    """Name a state of a parameter."""
    return f"state '{key}' of {name}"


def name_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Name the first part of a checkpoint in which two ranks' descriptions differ."""
    owner = one["optimizer"]["class"]
    match first_difference(one, other):
        case ["plugin_states", plugin, *_]:
            return f"the state of plugin '{plugin}'"
        case ["optimizer", "states", name, key, *_]:
            return f"{owner}'s {state_name(name, key)}"
        case ["optimizer", "states", name]:
            return f"{owner}'s state of {name}"
        case ["optimizer", "groups", number, key, *_]:
            return f"{owner}'s '{key}' of parameter group {number}"
        case path:
            return " ".join(path)


def first_difference(one: Any, other: Any) -> list[str]:
    """Return the keys to the first difference between two descriptions."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            if key not in one or key not in other:
                return [str(key)]
            # NaN differs from itself, but not as text.
            if json.dumps(one[key]) != json.dumps(other[key]):
                return [str(key), *first_difference(one[key], other[key])]
    return []


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
