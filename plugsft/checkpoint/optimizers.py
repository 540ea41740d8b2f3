"""Optimizers in checkpoints: the states of weights, and what training changes besides.

A checkpoint keeps only those values of parameter groups and attributes that training has changed,
such as the counters of ScheduleFree. All others are settings, which are given when the optimizer is
made: a setting that the user changes before a resume counts.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import CheckpointError
from ..model.tensor_shards import dtype_name, dtype_named
from ..ranks.optimizer_checks import optimizers_in
from ..ranks.weights import Weights, ZeroWeights
from .tree import PLAIN, RESUME_ALIKE, Decoder, Encoder, Unstorable

FOLDER = "optimizer"
STATE_DICT_KEYS = ("state", "param_groups")
"""The keys of every optimizer's `state_dict`."""
Values = dict[str, Any]


class OptimizerState:
    """The state of an optimizer, and of those inside it that have states of their own."""

    def __init__(self, weights: Weights, optimizer: Optimizer) -> None:
        self._weights, self._optimizers = weights, optimizers_in(optimizer)
        self._initial = [
            settings_of(Encoder(weights.device), one, FOLDER) for one in self._optimizers
        ]

    def describe(self, encode: Encoder) -> list[dict[str, Any]]:
        """Describe what training has changed; the shards of tensors go to `encode`."""
        folders = [FOLDER, *(f"{FOLDER}-{number}" for number in range(1, len(self._optimizers)))]
        return [
            self._describe(encode, *one)
            for one in zip(self._optimizers, self._initial, folders, strict=True)
        ]

    def _describe(
        self, encode: Encoder, optimizer: Optimizer, initial: list[Values], folder: str
    ) -> dict[str, Any]:
        values = cast("dict[Any, Any]", optimizer.state).items()
        shared = {key: value for key, value in values if isinstance(key, str)}
        return {
            "class": type(optimizer).__name__,
            "states": self.describe_states(encode, optimizer, folder),
            "settings": _changed(settings_of(encode, optimizer, folder), initial),
            "shared": encode(shared, f"{folder}/shared"),
            "extra": encode(_extra(optimizer), f"{folder}/extra"),
        }

    def restore(self, decode: Decoder, saved: list[dict[str, Any]]) -> None:
        """Restore what `describe` described."""
        now = [type(optimizer).__name__ for optimizer in self._optimizers]
        then = [one["class"] for one in saved]
        if then != now:
            raise CheckpointError(
                f"{decode.reader.folder}: the optimizer was {' with '.join(then)} and is "
                f"{' with '.join(now)}, which cannot read its state; use the former, or train the "
                "model of this checkpoint (plugsft export makes it) in another output folder"
            )
        for optimizer, one in zip(self._optimizers, saved, strict=True):
            self._restore(replace(decode, owner=one["class"]), optimizer, one)

    def _restore(self, decode: Decoder, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        if added := decode(saved["extra"], "state_dict"):
            optimizer.load_state_dict(optimizer.state_dict() | added)
        self.restore_states(decode, optimizer, saved["states"])
        for key, value in decode(saved["shared"], "state").items():
            optimizer.state[key] = value
        targets, settings = [vars(optimizer), *optimizer.param_groups], saved["settings"]
        if len(targets) != len(settings):
            raise CheckpointError(
                f"{decode.reader.folder}: {decode.owner} had {len(settings) - 1} parameter groups "
                f"and has {len(targets) - 1}; make the same groups again"
            )
        for target, values in zip(targets, settings, strict=True):
            for key, value in values.items():
                target[key] = _assign(decode(value, f"'{key}'"), target.get(key))

    def describe_states(self, encode: Encoder, optimizer: Optimizer, folder: str) -> Values:
        """Describe the states of weights, by the names of the weights."""
        return {
            name: {
                key: encode(value, f"{folder}/{name}/{key}", weight) for key, value in state.items()
            }
            for name, weight in self._weights.parameters(trained=False).items()
            if (state := optimizer.state.get(weight))
        }

    def restore_states(self, decode: Decoder, optimizer: Optimizer, states: Values) -> None:
        """Restore the states of weights."""
        named = self._weights.parameters(trained=False)
        if strange := {*states} - {*named}:
            raise decode.reader.mismatch(f"{FOLDER}/{min(strange)}")
        for name, weight in named.items():
            optimizer.state.pop(weight, None)
            if name in states:
                optimizer.state[weight] = {
                    key: decode(value, state_name(name, key), weight)
                    for key, value in states[name].items()
                }


class ZeroOptimizerState(OptimizerState):
    """The state of an optimizer under ZeRO-3, whose weights are flat tensors of many."""

    def __init__(self, weights: ZeroWeights, optimizer: Any) -> None:
        self._zero = optimizer.optimizer
        super().__init__(weights, self._zero.optimizer)
        self._weights: ZeroWeights = weights

    def _flat_tensor_of(self, parameter: Any) -> tuple[int, Tensor]:
        """Return the number and values of the flat tensor of a parameter."""
        number = self._zero.grad_position[self._zero.get_param_id(parameter)][0]
        return number, self._zero.fp32_partitioned_groups_flat[number]

    def describe_states(self, encode: Encoder, optimizer: Optimizer, folder: str) -> Values:
        """Describe the states of weights: their ranges of the flat tensors' states."""
        states: Values = {}
        read = self._weights.access.safe_get_local_optimizer_state
        for name, parameter in self._weights.parameters().items():
            number, flat = self._flat_tensor_of(parameter)
            states[name] = {}
            for key, value in optimizer.state.get(flat, {}).items():
                if not isinstance(value, Tensor) or value.shape != flat.shape:
                    stored = f"{folder}/joined-{number}/{key}"
                    states[name][key] = encode(value, stored, flat)
                    continue
                stored = f"{folder}/{name}/{key}"
                shard = self._weights.range_of(parameter, read(parameter, key))
                encode.shards[stored] = shard
                kind = {"tensor": dtype_name(value.dtype), "shape": [*shard.shape]}
                states[name][key] = kind | {"like_weight": stored}
        return states

    def restore_states(self, decode: Decoder, optimizer: Optimizer, states: Values) -> None:
        """Restore the states of the flat tensors; what is not like a weight must be one value."""
        write = self._weights.access.safe_set_local_optimizer_state
        counts: dict[int, str] = {}
        for name, parameter in self._weights.parameters().items():
            number, flat = self._flat_tensor_of(parameter)
            state = states.get(name, {})
            ranges = {key: value for key, value in state.items() if _is_range(value)}
            others = {key: value for key, value in state.items() if key not in ranges}
            if number not in counts:
                counts[number] = json.dumps(others)
                optimizer.state[flat] = {
                    key: decode(value, state_name(name, key), flat) for key, value in others.items()
                }
            if counts[number] != json.dumps(others):
                raise CheckpointError(
                    f"{decode.reader.folder}: {decode.owner}'s {state_name(name, min(others))} "
                    "differs from that of other weights, and under ZeRO-3 they share one: "
                    f"{RESUME_ALIKE}"
                )
            for key, value in ranges.items():
                dtype = dtype_named(value["tensor"])
                if key not in optimizer.state[flat]:
                    optimizer.state[flat][key] = torch.zeros_like(flat, dtype=dtype)
                padded = torch.zeros_like(parameter.ds_tensor, dtype=dtype)
                own = self._weights.range_of(parameter, padded)
                decode.reader.fill(value["like_weight"], own)
                write(parameter, padded, key)


def settings_of(encode: Encoder, optimizer: Optimizer, folder: str) -> list[Values]:
    """Describe the plain attributes of an optimizer, and the values of each parameter group.

    A function or another object in a group is a setting: it is given when the optimizer is made.
    """
    attributes = {key: value for key, value in vars(optimizer).items() if isinstance(value, PLAIN)}
    described = [attributes]
    for number, group in enumerate(optimizer.param_groups):
        described.append({})
        # The schedule sets the learning rate before each step.
        for key in sorted({*group} - {"params", "lr"}):
            try:
                described[-1][key] = encode(group[key], f"{folder}/groups/{number}/{key}")
            except Unstorable:
                continue
    return described


def state_name(name: str, key: str) -> str:
    """Name a state of a parameter."""
    return f"state '{key}' of {name}"


def _extra(optimizer: Optimizer) -> Values:
    """Return the entries that an optimizer adds to its `state_dict`."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return {}
    return {k: v for k, v in optimizer.state_dict().items() if k not in STATE_DICT_KEYS}


def _changed(now: list[Values], initial: list[Values]) -> list[Values]:
    """Return what training has changed; NaN equals NaN."""
    none: Values = {}
    return [
        {
            key: value
            for key, value in values.items()
            if json.dumps(value) != json.dumps(before.get(key))
        }
        for values, before in zip_longest(now, initial, fillvalue=none)
    ]


def _is_range(described: Any) -> bool:
    return isinstance(described, Mapping) and "like_weight" in described


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
