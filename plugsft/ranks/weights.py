"""Where this rank's numbers of each weight lie, under any strategy.

All of them in one process and under DDP, rows under FSDP2, and a range of the flat weight under
ZeRO-3. Checkpoints and plugins see no other difference between the strategies.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module

from ..base.errors import PluginError
from ..model.tensor_shards import TensorShard, local_values, shard_of, zero3_range


class Weights:
    """This rank's weights: whole ones, or rows under FSDP2."""

    def __init__(self, accelerator: Accelerator, model: Module) -> None:
        self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
        self.device = accelerator.device
        self._wrapped, self.plain = model, accelerator.unwrap_model(model)

    def parameters(self, trained_only: bool = True) -> dict[str, Any]:
        """Return the trained parameters, or all, by their names in the plain model."""
        # Under FSDP2, the last modules of an evaluation are still gathered.
        for module in self._wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        named = self.plain.named_parameters()
        return {
            name: parameter
            for name, parameter in named
            if parameter.requires_grad or not trained_only
        }

    def sharding(self) -> dict[str, Any]:
        """Describe the sharding; checkpoints keep it."""
        divided = any(isinstance(it, DTensor) for it in self.plain.parameters())
        return {"kind": "rows", "ranks": self.ranks} if divided else {"kind": "whole"}

    def shard(self, parameter: Any) -> TensorShard:
        """Return this rank's shard of a parameter; a view where possible."""
        return shard_of(parameter)

    def local(self, parameter: Any) -> Tensor:
        """Return this rank's numbers in the shape of its part; a view where possible."""
        return local_values(parameter)

    def whole(self, parameter: Any) -> Tensor:
        """Gather a whole parameter; a collective."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()

    def fill(self, parameter: Any, read: Callable[[TensorShard], None]) -> None:
        """Let `read` fill this rank's shard of a trained parameter."""
        read(shard_of(parameter))

    def update_copies(self) -> None:
        """Update what the forward pass computes with, where it is a copy of the weights."""

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's part of each trained weight, in float32 and by name.

        It may be a view, which training changes: clone it to keep it.
        """
        return {name: self.local(it).float() for name, it in self.parameters().items()}

    def set_shards(self, shards: Mapping[str, Tensor]) -> None:
        """Write parts of weights, as `shards` returns them; all ranks call it alike."""
        named = self.parameters()
        with torch.no_grad():
            for name, values in shards.items():
                self.fill(named[name], partial(_copy, values))
            self.update_copies()

    def ensure_fitting(self, shards: Mapping[str, Tensor]) -> None:
        """Refuse parts of weights that `set_shards` cannot write; nothing is written yet."""
        named = self.parameters()
        for name, values in shards.items():
            if name not in named:
                raise PluginError(f"'{name}' is no trained weight of the model")
            if values.shape != (shape := self.local(named[name]).shape):
                raise PluginError(
                    f"{name}: this rank's part has shape {[*shape]}, not {[*values.shape]}"
                )


def _copy(values: Tensor, shard: TensorShard) -> None:
    shard.values.copy_(values.reshape(-1))


class ZeroWeights(Weights):
    """The weights of ZeRO-3: equal ranges of each flat float32 weight, the last one padded.

    The forward pass uses copies in the model's type; each rank has small ones of them whole.
    """

    def __init__(self, accelerator: Accelerator, model: Module, zero: Any) -> None:
        super().__init__(accelerator, model)
        deepspeed: Any = importlib.import_module("deepspeed")
        self._gathered, self.access = deepspeed.zero.GatheredParameters, deepspeed.utils
        self._zero = zero

    def sharding(self) -> dict[str, Any]:
        """Describe the sharding: weights are joined before they are divided."""
        flat = [parameter.numel() for parameter in self._zero.fp32_partitioned_groups_flat]
        return {"kind": "numbers", "ranks": self.ranks, "joined": flat}

    def shard(self, parameter: Any) -> TensorShard:
        """Return this rank's shard of a parameter."""
        if not parameter.requires_grad:
            return shard_of(parameter)
        return zero3_range(parameter, self.access.safe_get_local_fp32_param(parameter))

    def range_in(self, parameter: Any, offset: int, joined: Tensor) -> TensorShard:
        """Return this rank's shard of a parameter in a tensor of many, where it begins."""
        return zero3_range(parameter, joined.narrow(0, offset, parameter.ds_tensor.ds_numel))

    def local(self, parameter: Any) -> Tensor:
        """Return this rank's numbers of a parameter; a view where possible."""
        return self.shard(parameter).values

    def whole(self, parameter: Any) -> Tensor:
        """Gather a whole parameter; a collective."""
        if parameter.requires_grad:
            return self.access.safe_get_full_fp32_param(parameter)  # type: ignore[no-any-return]
        with self._gathered([parameter]):
            return parameter.detach().clone()  # type: ignore[no-any-return]

    def fill(self, parameter: Any, read: Callable[[TensorShard], None]) -> None:
        """Let `read` fill this rank's shard of a trained parameter."""
        padded = torch.zeros_like(parameter.ds_tensor, dtype=torch.float32)
        read(zero3_range(parameter, padded))
        self.access.safe_set_local_fp32_param(parameter, padded)

    def update_copies(self) -> None:
        """Copy the float32 numbers to those in the model's type, and drop whole copies.

        The next forward gathers the weights, as after an optimizer step.
        """
        for parameter in self.parameters().values():
            parameter.ds_tensor.copy_(self.access.safe_get_local_fp32_param(parameter))
        self._zero.parameter_offload.partition_all_parameters()
        self._zero.invalidate_secondary_tensor()
