"""This rank's shard of model and optimizer, saved and restored under any strategy."""

import importlib
import json
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from ..base.console import say
from ..base.errors import CheckpointError
from ..model.tensor_shards import TensorShard, shard_of
from .optimizer_state import (
    RESUME_ALIKE,
    STATES,
    Describer,
    Restorer,
    describe_groups,
    dtype_named,
    follow_weight_dtype,
    is_sharded_like_weight,
    old_description,
)
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

    def describe(self, per_rank: bool = False) -> tuple[dict[str, Any], dict[str, TensorShard]]:
        """Return a description of trained weights and optimizer state, and their shards.

        With `per_rank`, each rank writes its own copy of unsharded state.
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
        return {"weights": weights, "optimizer": optimizer}, describer.shards

    def restore(
        self,
        reader: ShardReader,
        description: dict[str, Any] | None,
        same_sharding: bool,
        per_rank: bool,
    ) -> None:
        """Restore model and optimizer from a checkpoint, without collectives.

        A checkpoint of the first format has no description. `same_sharding`: tensors are sharded as
        in the checkpoint. `per_rank`: each rank has its own description.
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

    def update_copies(self, reader: ShardReader) -> None:
        """Update other copies of the restored weights; a collective."""

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


class ZeroTrainState(TrainState):
    """The shards of ZeRO-3: equal pieces of each flat float32 tensor, the last one padded.

    The forward pass uses copies in the model's type; each rank has small ones of them whole.
    """

    flat = True

    def __init__(self, accelerator: Accelerator, model: Module, optimizer: Any) -> None:
        self._zero = optimizer.optimizer
        self._deepspeed: Any = importlib.import_module("deepspeed")
        self._access = self._deepspeed.utils
        super().__init__(accelerator, model, optimizer)

    @property
    def _base(self) -> Optimizer:
        base: Optimizer = self._zero.optimizer
        return base

    def sharding(self) -> dict[str, Any]:
        """Describe the sharding; a run with an equal description can restore all state."""
        flat = [parameter.numel() for parameter in self._zero.fp32_partitioned_groups_flat]
        return {"kind": "numbers", "ranks": self.ranks, "joined": flat}

    def shard(self, parameter: Any) -> TensorShard:
        """Return this rank's shard of a parameter."""
        trained = parameter.requires_grad
        return self._zero_shard(
            parameter,
            self._access.safe_get_local_fp32_param(parameter) if trained else parameter.ds_tensor,
        )

    def whole(self, parameter: Any) -> Tensor:
        """Gather a whole parameter; a collective."""
        if parameter.requires_grad:
            return self._access.safe_get_full_fp32_param(parameter)  # type: ignore[no-any-return]
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()  # type: ignore[no-any-return]

    def update_copies(self, reader: ShardReader) -> None:
        """Update the copies in the model's type; a collective."""
        for name, parameter in self.parameters().items():
            with (
                torch.no_grad(),
                self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0),
            ):
                if self.rank == 0:
                    reader.fill(f"{WEIGHTS}/{name}", shard_of(parameter.data), exact=False)

    def _flat_tensor_of(self, parameter: Any) -> tuple[int, Tensor]:
        """Return the number and values of the flat tensor of a parameter."""
        number = self._zero.grad_position[self._zero.get_param_id(parameter)][0]
        return number, self._zero.fp32_partitioned_groups_flat[number]

    def _describe_states(self, describer: Describer) -> dict[str, Any]:
        states = {}
        for name, parameter in self.parameters().items():
            number, flat = self._flat_tensor_of(parameter)
            states[name] = {
                key: self._describe_state(describer, name, key, value, flat, parameter)
                if isinstance(value, Tensor) and value.shape == flat.shape
                else describer.value(value, f"{STATES}/joined-{number}/{key}", flat)
                for key, value in self._base.state.get(flat, {}).items()
            }
        return states

    def _describe_state(
        self,
        describer: Describer,
        name: str,
        key: str,
        value: Tensor,
        flat: Tensor,
        parameter: Any,
    ) -> dict[str, Any]:
        """Describe a state with the shape of its parameter."""
        stored = f"{STATES}/{name}/{key}"
        read = self._access.safe_get_local_optimizer_state
        shard = describer.shards[stored] = self._zero_shard(parameter, read(parameter, key))
        return {
            "tensor": dtype_name(value.dtype),
            "shape": shard.shape,
            "divided": "weight",
            "name": stored,
        }

    def _restore_weights(self, reader: ShardReader, named: dict[str, Any]) -> None:
        for name, parameter in named.items():
            values = torch.zeros_like(parameter.ds_tensor, dtype=torch.float32)
            reader.fill(f"{WEIGHTS}/{name}", self._zero_shard(parameter, values))
            self._access.safe_set_local_fp32_param(parameter, values)

    def _restore_states(
        self, restorer: Restorer, states: dict[str, Any], types: dict[str, torch.dtype]
    ) -> None:
        groups: dict[int, dict[str, Any]] = {}
        seen: set[int] = set()
        for name, parameter in self.parameters().items():
            number, flat = self._flat_tensor_of(parameter)
            state = {
                key: follow_weight_dtype(value, types[name], torch.float32)
                for key, value in states.get(name, {}).items()
            }
            counts = {
                k: None if is_sharded_like_weight(value) else value for k, value in state.items()
            }
            if json.dumps(groups.setdefault(number, counts)) != json.dumps(counts):
                raise CheckpointError(
                    f"{restorer.reader.folder}: the optimizer's state of {name} differs from that "
                    f"of other weights, and under ZeRO-3 they share it; {RESUME_ALIKE}"
                )
            if number not in seen:
                seen.add(number)
                self._base.state[flat] = {}
            flat_state = self._base.state[flat]
            for key, value in state.items():
                if not is_sharded_like_weight(value):
                    flat_state[key] = restorer.value(value, state_name(name, key), flat)
                    continue
                dtype = dtype_named(value["tensor"])
                if key not in flat_state:
                    flat_state[key] = torch.zeros_like(flat, dtype=dtype)
                values = torch.zeros_like(parameter.ds_tensor, dtype=dtype)
                restorer.reader.fill(value["name"], self._zero_shard(parameter, values))
                self._access.safe_set_local_optimizer_state(parameter, values, key)

    def _zero_shard(self, parameter: Any, values: Tensor) -> TensorShard:
        start = self.rank * parameter.ds_tensor.ds_numel
        size = max(0, min(values.numel(), parameter.ds_numel - start))
        return TensorShard(values[:size], start, tuple(parameter.ds_shape))


def train_state_of(accelerator: Accelerator, model: Module, optimizer: Any) -> TrainState:
    """Return this rank's shard of model and optimizer."""
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    return (ZeroTrainState if zero else TrainState)(accelerator, model, optimizer)
