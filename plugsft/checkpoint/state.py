"""What a training has changed: weights, optimizer, loss scale, and the state of plugins."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from ..base.errors import CheckpointError, PluginError
from ..model.tensor_shards import TensorShard
from ..ranks.loss_scale import LossScale
from ..ranks.weights import Weights
from .files import ShardReader
from .optimizers import FOLDER, OptimizerState
from .tree import Decoder, Encoder, Unstorable, where_in_plugin

WEIGHTS = "model"
PLUGINS = "plugins"
STORABLE = (
    "checkpoints store None, booleans, numbers, text, lists, tuples, dictionaries with text or "
    "whole numbers as keys, tensors and WeightSlice"
)


class TrainState:
    """What a training has changed on this rank, described for checkpoints and restored from them.

    Nothing in here is a collective.
    """

    def __init__(self, weights: Weights, optimizer: Any, scale: LossScale) -> None:
        """Make it before the first step: later settings are compared with those of now."""
        self.weights, self._scale = weights, scale
        self._optimizer = OptimizerState(weights, optimizer)

    def describe(
        self, plugin_states: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, TensorShard]]:
        """Return a description, the same on all ranks, and this rank's shards of its tensors.

        `plugin_states`: plugin -> its state: plain values and tensors, the same on all ranks, and
        `WeightSlice`.
        """
        weights = self.weights
        encode = Encoder(weights.device, weights.parameters(trained=False))
        named = weights.parameters()
        for name, parameter in named.items():
            encode.shards[f"{WEIGHTS}/{name}"] = weights.shard(parameter)
        described: dict[str, Any] = {
            "weights": [*named],
            "loss_scale": self._scale.state(),
            "optimizers": [],
            "refused": "",
        }
        try:
            described["plugin_states"] = {
                name: encode(state, f"{PLUGINS}/{name}") for name, state in plugin_states.items()
            }
        except Unstorable as error:
            where = where_in_plugin(error.name)
            raise PluginError(f"{where} is a {error.kind}; {STORABLE}") from error
        try:
            described["optimizers"] = self._optimizer.describe(encode)
        except Unstorable as error:
            what = error.name.removeprefix(f"{FOLDER}/")
            described["refused"] = (
                f"the optimizer's {what} is a {error.kind}, which they cannot store"
            )
        return described, encode.shards

    def restore(
        self, reader: ShardReader, saved: Mapping[str, Any], goes_on: bool = True
    ) -> dict[str, Any]:
        """Restore the state of a checkpoint; return that of its plugins.

        A run that does not go on needs no optimizer, if that could not be stored.
        """
        weights = self.weights
        if saved["refused"] and goes_on:
            raise CheckpointError(
                f"{reader.folder}: cannot be resumed: {saved['refused']}; start again in another "
                "output folder, or train the model of this checkpoint (plugsft export makes it)"
            )
        then, now = saved["sharding"], weights.sharding()
        same = then == now or then["kind"] == now["kind"] == "whole"
        parameters = weights.parameters(trained=False)
        decode = Decoder(reader, weights.device, parameters, same)
        named = weights.parameters()
        ensure_same_parameters(reader, named, saved["weights"])
        with torch.no_grad():
            for name, parameter in named.items():
                weights.fill(parameter, partial(reader.fill, f"{WEIGHTS}/{name}"))
            weights.update_copies()
            if not saved["refused"]:
                self._optimizer.restore(decode, saved["optimizers"])
        self._scale.restore(saved["loss_scale"])
        described = saved["plugin_states"].items()
        return {name: decode(state, f"{PLUGINS}/{name}") for name, state in described}


def ensure_same_parameters(
    reader: ShardReader, named: Mapping[str, Any], saved: Collection[str]
) -> None:
    """Refuse a checkpoint in which other parameters were trained."""
    if differing := {*named} ^ {*saved}:
        raise reader.mismatch(min(differing))
