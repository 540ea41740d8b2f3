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
    zero3_shard = getattr(tensor, "ds_tensor", None)
    if zero3_shard is not None:
        return zero3_range(tensor, zero3_shard.detach().view(-1))
    shape = whole_shape(tensor)
    if not isinstance(tensor, DTensor):
        return TensorShard(tensor.detach().view(-1), 0, shape)
    local: Any = tensor.detach()
    start = 0
    if not isinstance(tensor.placements[0], Replicate):
        mesh = tensor.device_mesh
        rows = min(mesh.get_local_rank() * -(-shape[0] // mesh.size()), shape[0])
        start = rows * math.prod(shape[1:])
    return TensorShard(local.to_local().view(-1), start, shape)


def zero3_range(parameter: Any, padded: Tensor) -> TensorShard:
    """Return this rank's shard of a tensor that is padded and divided like a parameter."""
    start = dist.get_rank() * parameter.ds_tensor.ds_numel
    size = max(0, min(padded.numel(), parameter.ds_numel - start))
    return TensorShard(padded[:size], start, whole_shape(parameter))


def num_weights(tensor: Any) -> int:
    """Return the number of weights in a tensor, also of a sharded or quantized one."""
    quantized = getattr(tensor, "quant_state", None)
    return math.prod(quantized.shape if quantized else whole_shape(tensor))


def whole_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the whole tensor; ZeRO-3, where `tensor` is a shard, keeps it aside."""
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
