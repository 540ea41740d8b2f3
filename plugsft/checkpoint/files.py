"""Files of a checkpoint's tensor shards, written and read by any number of ranks.

A shard is a range of the flattened tensor: all of it (one process, DDP), rows (FSDP2), or any range
(ZeRO-3). The files hold offsets, so the number of ranks may change. Nothing is pickled, and no rank
needs whole tensors.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..base.atomic import Stamp, stamp, sync, write_json
from ..base.errors import CheckpointError
from ..base.machine import available_memory, env_number
from ..model.tensor_shards import TensorShard, dtype_name
from .same_run import read_json

OFFSETS = "places"
"""Key in a file's metadata: each shard's offset and the shape of its whole tensor."""
FILE_BYTES = 2**30
"""Approximate bytes of a file; writing one needs about as much memory."""
ROOM = 0.75
"""Most of the available memory that copies take."""
MAX_OPEN = 256
"""Most files that a reader keeps open."""


Shards = Mapping[str, TensorShard]


def owned_shards(rank: int, shards: Shards) -> Shards:
    """Leave out what another rank writes: the first one alone writes whole tensors."""
    return {
        name: shard
        for name, shard in shards.items()
        if shard.values.numel() and (rank == 0 or not shard.whole)
    }


def host_has_room(memory: Mapping[str, Tensor], owned: Shards) -> bool:
    """Whether all ranks of this host can copy: they measure at the same time."""
    # torch rounds pinned memory up to a power of two.
    size = sum(
        1 << (shard.values.nbytes - 1).bit_length()
        for name, shard in owned.items()
        if len(memory.get(name, ())) != len(shard.values)
    )
    whole = all(shard.whole for shard in owned.values())
    ranks = 1 if whole else env_number("LOCAL_WORLD_SIZE", 1, 1)
    return size + min(size, FILE_BYTES) <= ROOM * available_memory() / ranks


def stage(memory: dict[str, Tensor], owned: Shards) -> Shards:
    """Copy this rank's shards to memory of the host, which saves share."""
    copies = {}
    for name, shard in owned.items():
        values = shard.values
        copy = memory.get(name)
        if copy is None or (len(copy), copy.dtype) != (len(values), values.dtype):
            memory[name] = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        copies[name] = replace(shard, values=memory[name].copy_(values))
    return copies


def write_shards(folder: Path, rank: int, shards: Shards, copy: bool = False) -> dict[str, Stamp]:
    """Write shards and sync them; return the files' stamps, and leave them for the main process.

    `copy` is for shards that are not staged.
    """
    stamps = {}
    for number, batch in enumerate(_batches(shards.items())):
        offsets = {name: (shard.start, shard.shape) for name, shard in batch}
        path = folder / f"rank-{rank:05d}-{number:03d}.safetensors"
        # safetensors refuses views of the same memory.
        values = {name: shard.values.to("cpu", copy=copy) for name, shard in batch}
        save_file(values, path, {OFFSETS: json.dumps(offsets)})
        sync(path)
        stamps[path.name] = stamp(path)
    write_json(stamps_file(folder, rank), stamps)
    return stamps


def stamps_file(folder: Path, rank: int) -> Path:
    """The file in which a rank leaves the stamps of what it wrote."""
    return folder / f".rank-{rank:05d}.json.tmp"


def stamps_of_ranks(folder: Path, ranks: int) -> dict[str, Stamp]:
    """Read the stamps that all ranks leave in the folder of a checkpoint."""
    # If the main process failed alone, others may still write.
    stamps, end = {}, time.monotonic() + 30
    for path in (stamps_file(folder, rank) for rank in range(ranks)):
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.1)
        stamps.update(read_json(path))
    return stamps


def _batches(shards: Iterable[tuple[str, TensorShard]]) -> Iterator[list[tuple[str, TensorShard]]]:
    batch: list[tuple[str, TensorShard]] = []
    size = 0
    for name, shard in shards:
        if batch and size + shard.values.nbytes > FILE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((name, shard))
        size += shard.values.nbytes
    if batch:
        yield batch


class ShardReader:
    """Reads ranges of a checkpoint's tensors.

    It opens files one by one until it has the whole range. A rank begins with the files of the rank
    that had about the same shard, so it opens few of a thousand files.
    """

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shards: dict[str, list[tuple[int, int, Path]]] = {}
        """Tensor -> begin, end and file of each of its shards."""
        open_file: Any = safe_open
        self._open = lru_cache(MAX_OPEN)(lambda path: open_file(path, "pt"))
        writers = {path: int(path.name.split("-")[1]) for path in folder.glob("rank-*.safetensors")}
        nearest = rank * (max(writers.values(), default=0) + 1) // ranks
        self._unread = sorted(writers, key=lambda path: (-abs(writers[path] - nearest), path))
        """Files whose headers are still unread; the next one is the last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.cache_clear()

    def fill(self, name: str, shard: TensorShard, exact: bool = True) -> None:
        """Read the values of a shard; `exact` refuses to round them to the shard's type."""
        begin, end = shard.start, shard.start + shard.values.numel()
        if begin == end:
            return
        filled = 0
        for start, stop, path in self._shards_of(name):
            low, high = max(begin, start), min(end, stop)
            if self.shapes[name] != shard.shape:
                raise self.mismatch(name)
            if low < high:
                values: Tensor = self._open(path).get_slice(name)[low - start : high - start]
                if exact and not widens(values.dtype, shard.values.dtype):
                    raise CheckpointError(
                        f"{self.folder}: {name} is {dtype_name(values.dtype)} there and would be "
                        f"rounded to {dtype_name(shard.values.dtype)} here; resume with the "
                        "precision and the launcher that wrote it"
                    )
                shard.values[low - begin : high - begin].copy_(values)
                filled += high - low
            if filled == end - begin:
                return
        if name not in self.shapes:
            raise self.mismatch(name)
        raise CheckpointError(
            f"{self.folder}: {name} has only {filled:,} of {end - begin:,} numbers; "
            "files of some rank are missing: all nodes must write to one file system"
        )

    def mismatch(self, name: str) -> CheckpointError:
        """Name a tensor that the model here has otherwise, or not at all."""
        return CheckpointError(
            f"{self.folder}: {name} does not fit this model: the checkpoint is of another model, "
            "or other weights of it were trained"
        )

    def _shards_of(self, name: str) -> Iterator[tuple[int, int, Path]]:
        """Yield the shards of a tensor; headers of more files are read only when needed."""
        number = 0
        while True:
            shards = self._shards.get(name, [])
            if number < len(shards):
                yield shards[number]
                number += 1
            elif not self._read_next():
                return

    def _read_next(self) -> bool:
        """Read the header of one more file; return False if none is left."""
        if not self._unread:
            return False
        path = self._unread.pop()
        file = self._open(path)
        for name, (start, shape) in json.loads(file.metadata()[OFFSETS]).items():
            values = file.get_slice(name)
            self._shards.setdefault(name, []).append((start, start + values.get_shape()[0], path))
            self.shapes[name] = tuple(shape)
        return True


def widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a type can represent every number of another."""
    floating = narrow.is_floating_point and wide.is_floating_point
    return narrow == wide or (floating and torch.promote_types(narrow, wide) == wide)
