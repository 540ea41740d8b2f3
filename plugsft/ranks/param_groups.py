"""Settings and counters of an optimizer in checkpoints: values of its groups, and its own."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import CheckpointError
from .optimizer_state import STATES, Describer, Restorer

SCHEDULED = "lr"
"""The value that the schedule sets before each step."""
PLAIN = bool | int | float | str | None
"""Types of an optimizer's attributes that are stored; others may be parts of the model."""

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
