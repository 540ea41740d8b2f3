"""What a training has changed: weights, optimizer, loss scale, and the state of plugins.

Of an optimizer, a checkpoint keeps the states of weights, and those values of parameter groups and
attributes that training has changed, such as the counters of ScheduleFree. All others are settings,
which are given when the optimizer is made: a setting that the user changes before a resume counts.
"""

import json
from collections.abc import Collection, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import CheckpointError, PluginError
from ..model.tensor_shards import TensorShard, shard_of
from ..ranks.loss_scale import LossScale
from ..ranks.optimizer_checks import optimizers_in
from ..ranks.weights import Weights, ZeroWeights
from .files import ShardReader
from .tree import (
    PLAIN,
    RESUME_ALIKE,
    Decoder,
    Encoder,
    Location,
    Unstorable,
    is_like_weight,
    where_in_plugin,
)

WEIGHTS, OPTIMIZER, PLUGINS = "model", "optimizer", "plugins"
"""Beginnings of the names of tensors."""
Values = dict[str, Any]


class TrainState:
    """What a training has changed on this rank, described for checkpoints and restored from them.

    Nothing in here is a collective.
    """

    def __init__(self, weights: Weights, optimizer: Any, scale: LossScale) -> None:
        """Make it before the first step: later settings are compared with those of now."""
        self.weights, self._scale = weights, scale
        self._zero: Any = optimizer.optimizer if isinstance(weights, ZeroWeights) else None
        self._optimizers = optimizers_in(self._zero.optimizer if self._zero else optimizer)
        encode = Encoder(weights.device)
        self._initial = [settings_of(encode, one, OPTIMIZER) for one in self._optimizers]

    def describe(self, plugin_states: Mapping[str, Any]) -> tuple[Values, dict[str, TensorShard]]:
        """Return a description, the same on all ranks, and this rank's shards of its tensors.

        `plugin_states`: plugin -> its state: plain values and tensors, the same on all ranks, and
        `WeightSlice`.
        """
        weights = self.weights
        encode = Encoder(weights.device, weights.parameters(trained_only=False))
        named = weights.parameters()
        for name, parameter in named.items():
            encode.shards[f"{WEIGHTS}/{name}"] = weights.shard(parameter)
        described: Values = {
            "weights": [*named],
            "sharding": weights.sharding(),
            "loss_scale": self._scale.state(),
            "plugin_states": {},
            "optimizers": [],
            "refused": "",
        }
        try:
            for name, state in plugin_states.items():
                described["plugin_states"][name] = encode(state, f"{PLUGINS}/{name}")
        except Unstorable as error:
            where = where_in_plugin(error.name)
            raise PluginError(
                f"{where} is a {error.kind}; checkpoints store None, booleans, numbers, text, "
                "lists, tuples, dictionaries with text or whole numbers as keys, tensors and "
                "WeightSlice"
            ) from error
        try:
            described["optimizers"] = self._describe_optimizers(encode)
        except Unstorable as error:
            what = error.name.removeprefix(f"{OPTIMIZER}/")
            described["refused"] = (
                f"the optimizer's {what} is a {error.kind}, which they cannot store"
            )
        return described, encode.shards

    def restore(
        self, reader: ShardReader, described: Mapping[str, Any], needs_optimizer: bool = True
    ) -> Values:
        """Restore the state of a checkpoint; return that of its plugins.

        `needs_optimizer` refuses a checkpoint that could not store the optimizer.
        """
        weights, refused = self.weights, described["refused"]
        if refused and needs_optimizer:
            raise CheckpointError(
                f"{reader.folder}: cannot be resumed: {refused}; start again in another "
                "output folder, or train the model of this checkpoint (plugsft export makes it)"
            )
        then, now = described["sharding"], weights.sharding()
        divided_alike = then == now or then["kind"] == now["kind"] == "whole"
        parameters = weights.parameters(trained_only=False)
        decode = Decoder(reader, weights.device, parameters, divided_alike)
        named = weights.parameters()
        ensure_same_parameters(reader, named, described["weights"])
        with torch.no_grad():
            for name, parameter in named.items():
                weights.fill(parameter, partial(reader.fill, f"{WEIGHTS}/{name}"))
            weights.update_copies()
            if not refused:
                self._restore_optimizers(decode, described["optimizers"])
        self._scale.restore(described["loss_scale"])
        states = described["plugin_states"].items()
        return {name: decode(state, f"{PLUGINS}/{name}") for name, state in states}

    def _places(self) -> dict[str, Location]:
        """Where the optimizer's state of each trained weight lies."""
        weights, zero, places = self.weights, self._zero, {}
        for name, weight in weights.parameters().items():
            if isinstance(weights, ZeroWeights):
                number, offset, *_ = zero.grad_position[zero.get_param_id(weight)]
                joined = zero.fp32_partitioned_groups_flat[number]
                places[name] = Location(joined, partial(weights.range_in, weight, offset))
            else:
                places[name] = Location(weight, lambda state: shard_of(state.contiguous()))
        return places

    def _describe_optimizers(self, encode: Encoder) -> list[Values]:
        """Describe an optimizer, and those inside it that have states of their own."""
        described: list[Values] = []
        for optimizer, initial in zip(self._optimizers, self._initial, strict=True):
            folder = f"{OPTIMIZER}-{len(described)}" if described else OPTIMIZER
            states: Any = optimizer.state
            of_weights = {
                name: {
                    key: encode(value, f"{folder}/{name}/{key}", place)
                    for key, value in states[place.like].items()
                }
                for name, place in self._places().items()
                if place.like in states
            }
            # What belongs to no weight has a name.
            shared = {key: value for key, value in states.items() if isinstance(key, str)}
            described.append(
                {
                    "class": type(optimizer).__name__,
                    "states": of_weights,
                    "settings": _changed(settings_of(encode, optimizer, folder), initial),
                    "shared": encode(shared, f"{folder}/shared"),
                    "extra": encode(_extra(optimizer), f"{folder}/extra"),
                }
            )
        return described

    def _restore_optimizers(self, decode: Decoder, described: list[Values]) -> None:
        now = [type(optimizer).__name__ for optimizer in self._optimizers]
        then = [one["class"] for one in described]
        if then != now:
            raise CheckpointError(
                f"{decode.reader.folder}: the optimizer was {' with '.join(then)} and is "
                f"{' with '.join(now)}, which cannot read its state; use the former, or train the "
                "model of this checkpoint (plugsft export makes it) in another output folder"
            )
        for optimizer, one in zip(self._optimizers, described, strict=True):
            owner = one["class"]
            if extra := decode(one["extra"], f"{owner}'s state_dict"):
                optimizer.load_state_dict(optimizer.state_dict() | extra)
            optimizer.state.clear()
            optimizer.state.update(decode(one["shared"], f"{owner}'s state"))
            self._restore_states(decode, optimizer, one["states"])
            restore_settings(decode, optimizer, one["settings"])

    def _restore_states(self, decode: Decoder, optimizer: Optimizer, states: Values) -> None:
        """Restore the states of weights; under ZeRO-3 many weights have one state together."""
        places, owner = self._places(), type(optimizer).__name__
        if strange := {*states} - {*places}:
            raise decode.reader.mismatch(f"{OPTIMIZER}/{min(strange)}")
        first: dict[tuple[int, str], Any] = {}
        for name, described in states.items():
            place = places[name]
            state = optimizer.state.setdefault(place.like, {})
            for key, value in described.items():
                where = f"{owner}'s state '{key}' of {name}"
                shared = (id(place.like), key)
                if shared not in first:
                    first[shared] = value
                    state[key] = decode(value, where, place)
                elif is_like_weight(value):
                    decode.fill(value["tensor"], place, state[key])
                elif value != first[shared]:
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


def restore_settings(decode: Decoder, optimizer: Optimizer, described: list[Values]) -> None:
    """Restore what training had changed of the attributes and the parameter groups."""
    owner, targets = type(optimizer).__name__, [vars(optimizer), *optimizer.param_groups]
    if len(targets) != len(described):
        raise CheckpointError(
            f"{decode.reader.folder}: {owner} had {len(described) - 1} parameter groups "
            f"and has {len(targets) - 1}; make the same groups again"
        )
    for target, values in zip(targets, described, strict=True):
        for key, value in values.items():
            target[key] = _assign(decode(value, f"{owner}'s '{key}'"), target.get(key))


def _extra(optimizer: Optimizer) -> Values:
    """Entries that an optimizer adds to its `state_dict` belong to no weight and no group."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return {}
    standard = ("state", "param_groups")
    return {key: value for key, value in optimizer.state_dict().items() if key not in standard}


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


def ensure_same_parameters(
    reader: ShardReader, named: Mapping[str, Any], stored: Collection[str]
) -> None:
    """Refuse a checkpoint in which other parameters were trained."""
    if differing := {*named} ^ {*stored}:
        raise reader.mismatch(min(differing))
