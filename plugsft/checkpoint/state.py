"""What a training has changed: weights, optimizer, loss scale, and the state of plugins.

Of an optimizer, a checkpoint keeps the states of weights. Its parameter groups are settings, which
are given when the optimizer is made: a setting that the user changes before a resume counts. What
an optimizer changes elsewhere, as ScheduleFree counts in its groups, is for its plugin to keep.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from ..base.errors import CheckpointError
from ..model.tensor_shards import TensorShard, shard_of
from ..ranks.loss_scale import LossScale
from ..ranks.optimizer_checks import kept_elsewhere
from ..ranks.weights import Weights, ZeroWeights
from .files import ShardReader
from .tree import (
    RESUME_ALIKE,
    Decoder,
    Encoder,
    Location,
    inside,
    is_like_weight,
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
        self.optimizer: Any = self._zero.optimizer if self._zero else optimizer
        self._first = kept_elsewhere(self.optimizer)

    def changed_elsewhere(self) -> list[str]:
        """Name what the optimizer has changed outside of the states of weights."""
        now = kept_elsewhere(self.optimizer)
        return sorted(name for name in now if now[name] != self._first.get(name))

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
            "optimizer": type(self.optimizer).__name__,
            "optimizer_states": {},
        }
        for name, state in plugin_states.items():
            described["plugin_states"][name] = encode(state, f"{PLUGINS}/{name}")
        states = self.optimizer.state
        for name, place in self._places().items():
            if states.get(place.like):
                described["optimizer_states"][name] = encode(
                    states[place.like], f"{OPTIMIZER}/{name}", place
                )
        return described, encode.shards

    def restore(self, reader: ShardReader, described: Mapping[str, Any]) -> Values:
        """Restore the state of a checkpoint; return that of its plugins."""
        weights = self.weights
        parameters = weights.parameters(trained_only=False)
        same_sharding = described["sharding"] == weights.sharding()
        decode = Decoder(reader, weights.device, parameters, same_sharding)
        named = weights.parameters()
        ensure_same_parameters(reader, named, described["weights"])
        with torch.no_grad():
            for name, parameter in named.items():
                weights.fill(parameter, partial(reader.fill, f"{WEIGHTS}/{name}"))
            weights.update_copies()
            self._restore_optimizer(decode, described)
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

    def _restore_optimizer(self, decode: Decoder, described: Mapping[str, Any]) -> None:
        """Restore the states of weights; under ZeRO-3 many weights have one state together."""
        then, now = described["optimizer"], type(self.optimizer).__name__
        if then != now:
            raise CheckpointError(
                f"{decode.reader.folder}: the optimizer was {then} and is {now}, which cannot read "
                "its state; use the former, or train the model of this checkpoint (plugsft export "
                "makes it) in another output folder"
            )
        places, states = self._places(), self.optimizer.state
        states.clear()
        first: dict[int, Values] = {}
        for name, state in described["optimizer_states"].items():
            place = places[name]
            if first.setdefault(id(place.like), state) is state:
                states[place.like] = decode(state, f"{OPTIMIZER}/{name}", place)
                continue
            for key, value in state["dict"].items():
                if is_like_weight(value):
                    tensor = states[place.like][key]
                    decode.fill(value["tensor"], inside(f"{OPTIMIZER}/{name}", key), place, tensor)
                elif value != first[id(place.like)]["dict"][key]:
                    raise CheckpointError(
                        f"{decode.reader.folder}: the optimizer's state '{key}' of {name} differs "
                        "from that of other weights, and under ZeRO-3 they share one: "
                        f"{RESUME_ALIKE}"
                    )


def ensure_same_parameters(
    reader: ShardReader, named: Mapping[str, Any], stored: Collection[str]
) -> None:
    """Refuse a checkpoint in which other parameters were trained."""
    if differing := {*named} ^ {*stored}:
        raise reader.mismatch(min(differing))
