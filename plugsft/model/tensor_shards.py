"""This rank's shard of a tensor: all of it, rows (FSDP2), or a flat range (ZeRO-3)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


@dataclass(frozen=True)
class TensorShard:
    """One rank's shard of a tensor."""

    values: Tensor
    """Flat values; a view of the tensor if possible."""
    start: int
    """Offset of the values in the flat tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def whole(self) -> bool:
        """Whether the shard is the whole tensor."""
        return self.values.numel() == math.prod(self.shape)


def shard_of(tensor: Any) -> TensorShard:
    """Return this rank's shard: rows of a DTensor, a flat range (ZeRO-3), or the whole tensor."""
    shape, zero3_shard = whole_shape(tensor), getattr(tensor, "ds_tensor", None)
    if zero3_shard is not None:
        start = dist.get_rank() * zero3_shard.ds_numel
        size = max(0, min(zero3_shard.numel(), tensor.ds_numel - start))
        return TensorShard(zero3_shard.detach().view(-1)[:size], start, shape)
    if not isinstance(tensor, DTensor):
        return TensorShard(tensor.detach().view(-1), 0, shape)
    local: Any = tensor.detach()
    start = 0
    if not isinstance(tensor.placements[0], Replicate):
        mesh = tensor.device_mesh
        rows = min(mesh.get_local_rank() * -(-shape[0] // mesh.size()), shape[0])
        start = rows * math.prod(shape[1:])
    return TensorShard(local.to_local().view(-1), start, shape)


def num_weights(tensor: Any) -> int:
    """Return the number of weights in a tensor, also of a sharded or quantized one."""
    quantized = getattr(tensor, "quant_state", None)
    return math.prod(quantized.shape if quantized else whole_shape(tensor))


def whole_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a whole tensor: under ZeRO-3 a rank's shard of it is flat."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def local_values(tensor: Any) -> Tensor:
    """Return a view of this rank's part of a tensor: whole, rows, or flat numbers (ZeRO-3)."""
    if getattr(tensor, "ds_tensor", None) is not None:
        return shard_of(tensor).values
    local = tensor.detach()
    return local.to_local() if isinstance(local, DTensor) else local


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a type: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return a type of torch by its short name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype
