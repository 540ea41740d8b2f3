"""What each rank holds of every tensor, on disk and back: on any number of ranks, however spread.

A part is a stretch of the flattened tensor: all of it (one process, DDP), some rows (FSDP2), or
some numbers (ZeRO-3). Files hold parts and say where these belong, so that whoever reads takes
what it needs of whatever was written. Nothing is pickled, and nobody ever holds the whole.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from .errors import CheckpointError

PLACES = "places"
"""In a file's metadata: of each part, where in its tensor it begins, and that tensor's shape."""
MOST = 2**30
"""Bytes of a file, about: so much more memory does saving take."""


@dataclass(frozen=True)
class Part:
    """One rank's stretch of a tensor."""

    values: Tensor
    """Flat, and a view where the tensor itself is at hand."""
    start: int
    shape: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.values.numel() == math.prod(self.shape)


def part_of(tensor: Tensor) -> Part:
    """Return what this rank holds of a tensor: all of it, or under FSDP2 its rows."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Part(tensor.detach().view(-1), 0, shape)
    mesh = tensor.device_mesh
    rows = min(mesh.get_local_rank() * -(-shape[0] // mesh.size()), shape[0])
    local: Any = tensor.detach()
    return Part(local.to_local().view(-1), rows * math.prod(shape[1:]), shape)


def local_part(tensor: Any) -> Part:
    """Return what this rank holds of a tensor, also of one that ZeRO-3 has taken apart."""
    mine = getattr(tensor, "ds_tensor", None)
    if mine is None:
        return part_of(tensor)
    start = dist.get_rank() * mine.ds_numel
    size = max(0, min(mine.numel(), tensor.ds_numel - start))
    return Part(mine.detach().view(-1)[:size], start, tuple(tensor.ds_shape))


def write(folder: Path, rank: int, parts: Mapping[str, Part]) -> None:
    """Write this rank's parts; what every rank has whole, the first writes."""
    mine = [
        (name, part)
        for name, part in parts.items()
        if part.values.numel() and (rank == 0 or not part.whole)
    ]
    for number, some in enumerate(_batches(mine)):
        places = {name: (part.start, part.shape) for name, part in some}
        save_file(
            # A copy of its own on the host: safetensors refuses views of one piece of memory.
            {name: part.values.to("cpu", copy=True) for name, part in some},
            folder / f"rank-{rank:05d}-{number:03d}.safetensors",
            {PLACES: json.dumps(places)},
        )


def _batches(parts: Iterable[tuple[str, Part]]) -> Iterator[list[tuple[str, Part]]]:
    some: list[tuple[str, Part]] = []
    size = 0
    for name, part in parts:
        if some and size + part.values.nbytes > MOST:
            yield some
            some, size = [], 0
        some.append((name, part))
        size += part.values.nbytes
    if some:
        yield some


class Stored:
    """The tensors of a checkpoint, read by stretches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._lie: dict[str, list[tuple[int, int, Any]]] = {}
        """Of each tensor: where a part begins and ends, and the file that has it."""
        self._stack = ExitStack()
        for path in sorted(folder.glob("rank-*.safetensors")):
            file = self._stack.enter_context(safe_open(path, "pt"))
            for name, (start, shape) in json.loads(file.metadata()[PLACES]).items():
                stop = start + file.get_slice(name).get_shape()[0]
                self._lie.setdefault(name, []).append((start, stop, file))
                self.shapes[name] = tuple(shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fill(self, name: str, part: Part) -> None:
        """Read into a part what lies of it in any file."""
        if self.shapes.get(name) != part.shape:
            raise self.strange(name)
        begin, end = part.start, part.start + part.values.numel()
        filled = 0
        for start, stop, file in self._lie[name]:
            low, high = max(begin, start), min(end, stop)
            if low < high:
                values = file.get_slice(name)[low - start : high - start]
                part.values[low - begin : high - begin].copy_(values)
                filled += high - low
        if filled != end - begin:
            raise CheckpointError(
                f"{self.folder}: of {name} only {filled:,} of {end - begin:,} numbers are there; "
                "files of some rank are missing: all nodes must write to one file system"
            )

    def of(self, kind: str) -> set[str]:
        """Return the names of the tensors of a kind: "model", "optimizer"."""
        return {
            name.removeprefix(f"{kind}/") for name in self.shapes if name.startswith(f"{kind}/")
        }

    def strange(self, name: str) -> CheckpointError:
        """Return the error of a tensor that is not as the model has it."""
        return CheckpointError(
            f"{self.folder}: {name} is not there as this model has it: the checkpoint is of "
            "another model, or other parts of it were trained"
        )
