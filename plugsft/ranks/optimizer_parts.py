"""The parts of an optimizer in checkpoints: states, values, and optimizers inside it."""

import json
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from .optimizer_state import STATES, Describer, Restorer
from .param_groups import describe_values


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
