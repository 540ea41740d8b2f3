"""This rank's shard of model and optimizer, saved and restored under any strategy."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from ..base.console import say
from ..base.errors import PluginError
from ..model.tensor_shards import TensorShard, local_values, shard_of
from .optimizer_state import (
    STATES,
    Describer,
    Restorer,
    describe_groups,
    dtype_named,
    follow_weight_dtype,
    old_description,
)
from .plugin_state import PLUGINS, PluginDescriber, PluginRestorer
from .shard_files import ShardReader, dtype_name

WEIGHTS = "model"


class TrainState:
    """This rank's shard of a model and its optimizer: whole tensors, or rows under FSDP2."""

    flat = False
    """Whether weights are concatenated to flat tensors, and sharded between any two numbers."""

    def __init__(self, accelerator: Accelerator, model: Module, optimizer: Any) -> None:
        self.rank, self.optimizer = accelerator.process_index, optimizer
        self.ranks, self._device = accelerator.num_processes, accelerator.device
        self._wrapped, self.plain = model, accelerator.unwrap_model(model)
        # Compared on resuming, to tell the user's changes from those of training.
        self._initial = describe_groups(Describer(self.rank, self._device), self._base.param_groups)

    @property
    def _base(self) -> Optimizer:
        """The optimizer that updates the weights."""
        base: Optimizer = self.optimizer
        return base

    def parameters(self, trained: bool = True) -> dict[str, Any]:
        """Return the trained parameters, or all, by their names in the plain model."""
        for module in self._wrapped.modules():
            if isinstance(module, FSDPModule):
                # After an evaluation the last modules are still gathered.
                module.reshard()
        named = self.plain.named_parameters()
        return {
            name: parameter for name, parameter in named if parameter.requires_grad or not trained
        }

    def sharding(self) -> dict[str, Any]:
        """Describe the sharding; a run with an equal description can restore all state."""
        return {"kind": "whole" if self._mesh() is None else "rows", "ranks": self.ranks}

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's part of each trained weight, in float32 and by name.

        A part is the whole weight in one process and under DDP, rows under FSDP2, and flat numbers
        under ZeRO-3. It may be a view, which training changes: clone it to keep it, and write with
        `set_shards`.
        """
        return {
            name: self.local(parameter).float() for name, parameter in self.parameters().items()
        }

    def set_shards(self, shards: Mapping[str, Tensor]) -> None:
        """Write parts of weights, as `shards` returns them; all ranks call it alike."""
        named = self.parameters()
        with torch.no_grad():
            for name, values in shards.items():
                if name not in named:
                    raise PluginError(f"'{name}' is no trained weight of the model")
                if values.shape != (shape := self.local(named[name]).shape):
                    raise PluginError(
                        f"{name}: this rank's part has shape {[*shape]}, not {[*values.shape]}"
                    )
                self._set_local(named[name], values)
        self._update_copies()

    def local(self, parameter: Any) -> Tensor:
        """Return this rank's part of a trained parameter; a view where possible."""
        return local_values(parameter)

    def _set_local(self, parameter: Any, values: Tensor) -> None:
        local_values(parameter).copy_(values)

    def _update_copies(self) -> None:
        """Update what the forward pass computes with, where it is a copy of the weights."""

    def describe(
        self, per_rank: bool = False, plugin_states: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, TensorShard]]:
        """Describe trained weights, optimizer and plugins; return the description and shards.

        `plugin_states`: plugin -> its state: plain values and tensors, the same on all ranks, and
        `WeightSlice`. With `per_rank`, each rank writes its own copy of unsharded state.
        """
        sharded = self.sharding()["kind"] != "whole"
        describer, weights = Describer(self.rank, self._device, sharded, per_rank), {}
        for name, parameter in self.parameters().items():
            shard = describer.shards[f"{WEIGHTS}/{name}"] = self.shard(parameter)
            weights[name] = {"dtype": dtype_name(shard.values.dtype), "shape": shard.shape}
        optimizer = {
            "class": type(self._base).__name__,
            "states": self._describe_states(describer),
            "groups": describe_groups(describer, self._base.param_groups),
            "initial": self._initial,
            "shared": describer.shared(self._base),
            "extra": describer.extra(self._base),
        }
        plugins = PluginDescriber(
            self.rank, self._device, per_rank=per_rank, weights=self.parameters(trained=False)
        )
        described = {
            name: plugins.value(state, f"{PLUGINS}/{name}")
            for name, state in (plugin_states or {}).items()
        }
        description = {"weights": weights, "optimizer": optimizer, "plugin_states": described}
        return description, describer.shards | plugins.shards

    def restore(
        self,
        reader: ShardReader,
        description: dict[str, Any] | None,
        same_sharding: bool,
        per_rank: bool,
    ) -> dict[str, Any]:
        """Restore model and optimizer from a checkpoint; return the state of its plugins.

        It has no collectives. A checkpoint of the first format has no description.
        `same_sharding`: tensors are sharded as in the checkpoint. `per_rank`: each rank has its own
        description.
        """
        description, named = description or old_description(reader, self._base), self.parameters()
        ensure_same_parameters(reader, named, {*description["weights"]})
        restorer = Restorer(
            reader, self.rank, self._device, self._mesh(), same_sharding, per_rank, flat=self.flat
        )
        optimizer = description["optimizer"]
        restorer.ensure_class(optimizer.get("class"), self._base)
        with torch.no_grad():
            self._restore_weights(reader, named)
            self._update_copies()
            types = {
                name: dtype_named(entry["dtype"]) for name, entry in description["weights"].items()
            }
            restorer.extra(optimizer.get("extra", {}), self._base)
            self._restore_states(restorer, optimizer["states"], types)
            restorer.shared(optimizer.get("shared", {}), self._base)
            if "groups" in optimizer:
                restorer.groups(optimizer, self._base.param_groups, self._initial)
        now = {name: self.shard(parameter).values.dtype for name, parameter in named.items()}
        if changed := {(types[name], now[name]) for name in named if types[name] != now[name]}:
            was, becomes = next(iter(changed))
            say(
                f"checkpoint: its weights are {dtype_name(was)} and resume in "
                f"{dtype_name(becomes)}, as do optimizer states of the same type"
            )
        return self._restore_plugins(reader, description.get("plugin_states", {}), per_rank)

    def _restore_plugins(
        self, reader: ShardReader, described: dict[str, Any], per_rank: bool
    ) -> dict[str, Any]:
        weights = self.parameters(trained=False)
        restorer = PluginRestorer(
            reader, self.rank, self._device, None, True, per_rank, weights=weights
        )
        return {
            name: restorer.value(state, f"{PLUGINS}/{name}") for name, state in described.items()
        }

    def shard(self, parameter: Any) -> TensorShard:
        """Return this rank's shard of a parameter."""
        return shard_of(parameter)

    def whole(self, parameter: Any) -> Tensor:
        """Gather a whole parameter; a collective."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()

    def _mesh(self) -> Any:
        parameters = self.plain.parameters()
        first = next((tensor for tensor in parameters if isinstance(tensor, DTensor)), None)
        return None if first is None else first.device_mesh

    def _describe_states(self, describer: Describer) -> dict[str, Any]:
        states, names = {}, self.parameters(trained=False).items()
        for name, parameter in names:
            if state := self._base.state.get(parameter):
                where = f"{STATES}/{name}"
                states[name] = {
                    key: describer.value(value, f"{where}/{key}", parameter)
                    for key, value in state.items()
                }
        return states

    def _restore_weights(self, reader: ShardReader, named: dict[str, Any]) -> None:
        fill_weights(reader, named)

    def _restore_states(
        self, restorer: Restorer, states: dict[str, Any], types: dict[str, torch.dtype]
    ) -> None:
        named = self.parameters(trained=False)
        if strange := {*states} - {*named}:
            raise restorer.reader.mismatch(f"{STATES}/{min(strange)}")
        for name, parameter in named.items():
            self._base.state.pop(parameter, None)
            if name in states:
                self._base.state[parameter] = {
                    key: restorer.value(
                        follow_weight_dtype(value, types.get(name), parameter.dtype),
                        state_name(name, key),
                        parameter,
                    )
                    for key, value in states[name].items()
                }


def state_name(name: str, key: str) -> str:
    """Name a state of a parameter."""
    return f"state '{key}' of {name}"


def ensure_same_parameters(reader: ShardReader, named: dict[str, Any], weights: set[str]) -> None:
    """Refuse a checkpoint in which other parameters were trained."""
    if differing := {*named} ^ weights:
        raise reader.mismatch(min(differing))


def fill_weights(reader: ShardReader, named: dict[str, Any], exact: bool = True) -> None:
    """Read whole parameters, or under FSDP2 this rank's rows."""
    for name, parameter in named.items():
        reader.fill(f"{WEIGHTS}/{name}", shard_of(parameter), exact)
