"""Optimizers in checkpoints: the states of weights, and what training changes besides.

A checkpoint keeps only those values of parameter groups and attributes that training has changed,
such as the counters of ScheduleFree. All others are settings, which are given when the optimizer is
made: a setting that the user changes before a resume counts.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import CheckpointError
from ..model.tensor_shards import TensorShard, shard_of
from ..ranks.optimizer_checks import optimizers_in
from ..ranks.weights import Weights, ZeroWeights
from .tree import PLAIN, RESUME_ALIKE, Decoder, Encoder, Unstorable

FOLDER = "optimizer"
STATE_DICT_KEYS = ("state", "param_groups")
"""The keys of every optimizer's `state_dict`."""
Values = dict[str, Any]


class Slot(NamedTuple):
    """Where an optimizer keeps the state of a weight."""

    name: str
    tensor: Any
    """The weight itself; under ZeRO-3 a flat tensor, which it shares with other weights."""
    part: Callable[[Any], TensorShard]
    """The weight's part of a state like that tensor."""


class OptimizerState:
    """The state of an optimizer, and of those inside it that have states of their own."""

    def __init__(self, weights: Weights, optimizer: Any) -> None:
        self._weights = weights
        self._zero: Any = optimizer.optimizer if isinstance(weights, ZeroWeights) else None
        self._optimizers = optimizers_in(self._zero.optimizer if self._zero else optimizer)
        self._initial = [
            settings_of(Encoder(weights.device), one, FOLDER) for one in self._optimizers
        ]

    def _slots(self) -> Iterator[Slot]:
        """Yield the slot of each trained weight."""
        for name, parameter in self._weights.parameters().items():
            if isinstance(self._weights, ZeroWeights):
                place = self._zero.grad_position[self._zero.get_param_id(parameter)]
                flat = self._zero.fp32_partitioned_groups_flat[place[0]]
                yield Slot(name, flat, partial(self._weights.range_in, parameter, place[1]))
            else:
                yield Slot(name, parameter, lambda state: shard_of(state.contiguous()))

    def describe(self, encode: Encoder) -> list[Values]:
        """Describe what training has changed; the shards of tensors go to `encode`."""
        described: list[Values] = []
        for optimizer, initial in zip(self._optimizers, self._initial, strict=True):
            folder = f"{FOLDER}-{len(described)}" if described else FOLDER
            states = cast("dict[Any, Any]", optimizer.state)
            shared = {key: value for key, value in states.items() if isinstance(key, str)}
            described.append(
                {
                    "class": type(optimizer).__name__,
                    "states": {
                        slot.name: {
                            key: encode(value, f"{folder}/{slot.name}/{key}", slot)
                            for key, value in states[slot.tensor].items()
                        }
                        for slot in self._slots()
                        if slot.tensor in states
                    },
                    "settings": _changed(settings_of(encode, optimizer, folder), initial),
                    "shared": encode(shared, f"{folder}/shared"),
                    "extra": encode(_extra(optimizer), f"{folder}/extra"),
                }
            )
        return described

    def restore(self, decode: Decoder, saved: list[Values]) -> None:
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
            self._restore(decode, optimizer, one)

    def _restore(self, decode: Decoder, optimizer: Optimizer, saved: Values) -> None:
        owner = saved["class"]
        if added := decode(saved["extra"], f"{owner}'s state_dict"):
            optimizer.load_state_dict(optimizer.state_dict() | added)
        optimizer.state.clear()
        optimizer.state.update(decode(saved["shared"], f"{owner}'s state"))
        self._restore_states(decode, optimizer, saved)
        targets, settings = [vars(optimizer), *optimizer.param_groups], saved["settings"]
        if len(targets) != len(settings):
            raise CheckpointError(
                f"{decode.reader.folder}: {owner} had {len(settings) - 1} parameter groups "
                f"and has {len(targets) - 1}; make the same groups again"
            )
        for target, values in zip(targets, settings, strict=True):
            for key, value in values.items():
                target[key] = _assign(decode(value, f"{owner}'s '{key}'"), target.get(key))

    def _restore_states(self, decode: Decoder, optimizer: Optimizer, saved: Values) -> None:
        """Restore the states of weights; those that share a tensor must have the same values."""
        states, slots = saved["states"], {slot.name: slot for slot in self._slots()}
        if strange := {*states} - {*slots}:
            raise decode.reader.mismatch(f"{FOLDER}/{min(strange)}")
        seen: dict[tuple[int, str], Any] = {}
        for name, described in states.items():
            slot = slots[name]
            state = optimizer.state.setdefault(slot.tensor, {})
            for key, value in described.items():
                where = f"{saved['class']}'s state '{key}' of {name}"
                if key not in state:
                    state[key] = decode(value, where, slot)
                    seen[id(slot.tensor), key] = value
                elif isinstance(value, Mapping) and "like_weight" in value:
                    decode.fill(value, slot, state[key])
                elif value != seen[id(slot.tensor), key]:
                    raise CheckpointError(
                        f"{decode.reader.folder}: {where} differs from that of other weights, and "
                        f"under ZeRO-3 they share one: {RESUME_ALIKE}"
                    )


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


def _extra(optimizer: Optimizer) -> Values:
    """Entries that an optimizer adds to its `state_dict` belong to no weight and no group."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return {}
    return {k: v for k, v in optimizer.state_dict().items() if k not in STATE_DICT_KEYS}


def _changed(now: list[Values], initial: list[Values]) -> list[Values]:
    """Leave out settings, which are as they were at first; as text, NaN equals NaN."""
    none: Values = {}
    return [
        {
            key: value
            for key, value in values.items()
            if json.dumps(value) != json.dumps(before.get(key))
        }
        for values, before in zip_longest(now, initial, fillvalue=none)
    ]


def _assign(value: Any, current: Any) -> Any:
    """Return the new value, a tensor in the current one if possible: groups may share it."""
    tensors = isinstance(value, Tensor) and isinstance(current, Tensor)
    if tensors and (value.shape, value.dtype) == (current.shape, current.dtype):
        return current.copy_(value)
    return value
