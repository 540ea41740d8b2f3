"""This rank's shard of model and optimizer under ZeRO-3, saved and restored."""

import importlib
import json
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..base.errors import CheckpointError
from ..model.tensor_shards import TensorShard
from .param_groups import first_difference, state_name
from .shard_files import ShardReader, dtype_name
from .states import (
    RESUME_ALIKE,
    STATES,
    Describer,
    Restorer,
    dtype_named,
    is_sharded_like_weight,
)
from .train_state import WEIGHTS, TrainState


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

    def local(self, parameter: Any) -> Tensor:
        """Return this rank's part of a trained parameter; a view where possible."""
        return self.shard(parameter).values

    def _set_local(self, parameter: Any, values: Tensor) -> None:
        padded = torch.zeros_like(parameter.ds_tensor, dtype=torch.float32)
        padded[: len(values)] = values
        self._access.safe_set_local_fp32_param(parameter, padded)

    def _update_copies(self) -> None:
        """Copy the float32 numbers to those in the model's type, and drop whole copies.

        The next forward gathers the weights, as after an optimizer step.
        """
        for parameter in self.parameters().values():
            parameter.ds_tensor.copy_(self._access.safe_get_local_fp32_param(parameter))
        self._zero.parameter_offload.partition_all_parameters()
        self._zero.invalidate_secondary_tensor()

    def _flat_tensor_of(self, parameter: Any) -> tuple[int, Tensor]:
        """Return the number and values of the flat tensor of a parameter."""
        number = self._zero.grad_position[self._zero.get_param_id(parameter)][0]
        return number, self._zero.fp32_partitioned_groups_flat[number]

    def _describe_states(self, describer: Describer) -> dict[str, Any]:
        states: dict[str, Any] = {}
        read = self._access.safe_get_local_optimizer_state
        for name, parameter in self.parameters().items():
            number, flat = self._flat_tensor_of(parameter)
            states[name] = {}
            for key, value in self._base.state.get(flat, {}).items():
                if not isinstance(value, Tensor) or value.shape != flat.shape:
                    stored = f"{STATES}/joined-{number}/{key}"
                    states[name][key] = describer.value(value, stored, flat)
                    continue
                stored = f"{STATES}/{name}/{key}"
                shard = self._zero_shard(parameter, read(parameter, key))
                kind = {"tensor": dtype_name(value.dtype), "shape": shard.shape}
                states[name][key] = kind | {"divided": "weight", "name": stored}
                describer.shards[stored] = shard
        return states

    def _restore_weights(self, reader: ShardReader, named: dict[str, Any]) -> None:
        for name, parameter in named.items():
            values = torch.zeros_like(parameter.ds_tensor, dtype=torch.float32)
            shard = self._zero_shard(parameter, values)
            reader.fill(f"{WEIGHTS}/{name}", shard)
            self._set_local(parameter, shard.values)

    def _restore_states(self, restorer: Restorer, states: dict[str, Any]) -> None:
        groups: dict[int, dict[str, Any]] = {}
        seen: set[int] = set()
        for name, parameter in self.parameters().items():
            number, flat = self._flat_tensor_of(parameter)
            state = states.get(name, {})
            counts = {
                k: None if is_sharded_like_weight(value) else value for k, value in state.items()
            }
            if json.dumps(groups.setdefault(number, counts)) != json.dumps(counts):
                key = first_difference(groups[number], counts)[0]
                raise CheckpointError(
                    f"{restorer.reader.folder}: {restorer.optimizer}'s {state_name(name, key)} "
                    "differs from that of other weights, and under ZeRO-3 they share one: "
                    f"{RESUME_ALIKE}"
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
