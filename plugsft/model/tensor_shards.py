"""This rank's shard of a tensor: all of it, some rows (FSDP2), or some numbers (ZeRO-3)."""

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor."""

    values: Tensor
    """Flat; a view of the tensor if possible."""
    start: int
    shape: tuple[int, ...]

    own: bool = False
    """Whether each rank writes its own copy, even of a whole tensor."""

    @property
    def whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.values.numel() == math.prod(self.shape)


def part_of(tensor: Tensor) -> Part:
    """Return this rank's part of a tensor: its rows of a sharded DTensor, else all."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Part(tensor.detach().view(-1), 0, shape)
    local: Any = tensor.detach()
    start = 0
    if not isinstance(tensor.placements[0], Replicate):
        mesh = tensor.device_mesh
        rows = min(mesh.get_local_rank() * -(-shape[0] // mesh.size()), shape[0])
        start = rows * math.prod(shape[1:])
    return Part(local.to_local().view(-1), start, shape)


def local_part(tensor: Any) -> Part:
    """Return this rank's part of a tensor, ZeRO-3's shards too."""
    mine = getattr(tensor, "ds_tensor", None)
    if mine is None:
        return part_of(tensor)
    start = dist.get_rank() * mine.ds_numel
    size = max(0, min(mine.numel(), tensor.ds_numel - start))
    return Part(mine.detach().view(-1)[:size], start, tuple(tensor.ds_shape))
