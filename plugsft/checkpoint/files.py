"""Files of a checkpoint's tensor shards, written and read by any number of ranks.

A shard is a range of the flattened tensor: all of it (one process, DDP), rows (FSDP2), or any range
(ZeRO-3). The files hold offsets, so the number of ranks may change. Nothing is pickled, and no rank
needs whole tensors.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..base.atomic import Stamp, stamp, sync, write_text
from ..base.errors import CheckpointError
from ..base.machine import available_memory, env_number
from ..model.tensor_shards import TensorShard, dtype_name
from .same_run import read_json

PLACES = "places"
"""Key in a file's metadata: each shard's offset and the shape of its whole tensor."""
FILE_BYTES = 2**30
"""Approximate bytes of a file; writing one needs about as much memory."""
ROOM = 0.75
"""Most of the available memory that copies take."""
MAX_OPEN = 256
"""Most files that a reader keeps open."""

Shards = Mapping[str, TensorShard]
Copies = dict[str, Tensor]
"""Memory of the host for copies of shards, which saves share."""


def owned_shards(rank: int, shards: Shards) -> Shards:
    """Leave out what another rank writes: the first one alone writes whole tensors."""
    # A shard that is whole on another rank is whole on the first one, too, which writes it once.
    return {
        name: shard
        for name, shard in shards.items()
        if shard.values.numel() and (rank == 0 or not shard.whole)
    }


def host_has_room(copies: Copies, owned: Shards) -> bool:
    """Whether all ranks of this host can copy: they measure at the same time."""
    values = [shard.values for name, shard in owned.items() if not fits(copies, name, shard)]
    # torch rounds pinned memory up to a power of two.
    size = sum(1 << (tensor.nbytes - 1).bit_length() for tensor in values)
    # Of whole tensors, rank 0 alone has copies.
    whole = all(shard.whole for shard in owned.values())
    ranks = 1 if whole else env_number("LOCAL_WORLD_SIZE", 1, 1)
    # Writing a file takes memory for it, too.
    return size + min(size, FILE_BYTES) <= ROOM * available_memory() / ranks


def fits(copies: Copies, name: str, shard: TensorShard) -> bool:
    """Whether the memory of an earlier copy can take a shard."""
    copy, values = copies.get(name), shard.values
    return copy is not None and (len(copy), copy.dtype) == (len(values), values.dtype)


def copy_to_host(copies: Copies, owned: Shards) -> Shards:
    """Copy this rank's shards, so that training may change them."""
    for name, shard in owned.items():
        values = shard.values
        if not fits(copies, name, shard):
            copies[name] = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        copies[name].copy_(values)
    return {name: replace(shard, values=copies[name]) for name, shard in owned.items()}


def write_shards(folder: Path, rank: int, shards: Shards, copied: bool = True) -> None:
    """Write shards and sync them; leave the files' stamps for the main process.

    `copied`: they are copies on the host already.
    """
    files: list[dict[str, TensorShard]] = []
    size = FILE_BYTES
    for name, shard in shards.items():
        if size >= FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = shard
        size += shard.values.nbytes
    stamps = {}
    for number, file in enumerate(files):
        path = folder / f"rank-{rank:05d}-{number:03d}.safetensors"
        places = {name: (shard.start, shard.shape) for name, shard in file.items()}
        # safetensors refuses views of the same memory.
        values = {name: shard.values.to("cpu", copy=not copied) for name, shard in file.items()}
        save_file(values, path, {PLACES: json.dumps(places)})
        sync(path)
        stamps[path.name] = stamp(path)
    write_text(stamps_file(folder, rank), json.dumps(stamps))


def stamps_file(folder: Path, rank: int) -> Path:
    """The file in which a rank leaves the stamps of what it wrote."""
    return folder / f"rank-{rank:05d}.stamps.json"


def take_stamps(folder: Path, ranks: int) -> dict[str, Stamp]:
    """Read the stamps that all ranks leave in the folder of a checkpoint, and remove them."""
    # If the main process failed alone, others may still write.
    stamps, end = {}, time.monotonic() + 30
    for path in (stamps_file(folder, rank) for rank in range(ranks)):
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.1)
        stamps.update(read_json(path))
        path.unlink()
    return stamps


class ShardReader:
    """Reads ranges of a checkpoint's tensors.

    It opens files one by one until it has the whole range. A rank begins with the files of the rank
    that had about the same shard, so it opens few of a thousand files.
    """

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        self.folder = folder
        open_file: Any = safe_open
        opened = lru_cache(MAX_OPEN)(lambda path: open_file(path, "pt"))
        self._open = opened
        writers = {path: int(path.name.split("-")[1]) for path in folder.glob("rank-*.safetensors")}
        nearest = rank * (max(writers.values(), default=0) + 1) // ranks
        self._files = sorted(writers, key=lambda path: (abs(writers[path] - nearest), path))
        self._header = cache(lambda path: json.loads(opened(path).metadata()[PLACES]))
        """File -> start and whole shape of each tensor in it."""

    def fill(self, name: str, shard: TensorShard, exact: bool = True) -> None:
        """Read the values of a shard; `exact` refuses to round them to the shard's type."""
        begin, size = shard.start, shard.values.numel()
        filled, known = 0, size == 0
        for path in self._files:
            if filled == size:
                return
            if name not in (header := self._header(path)):
                continue
            known, (start, shape) = True, header[name]
            if tuple(shape) != shard.shape:
                raise self.mismatch(name)
            stored = self._open(path).get_slice(name)
            low, high = max(begin, start), min(begin + size, start + stored.get_shape()[0])
            if low < high:
                values: Tensor = stored[low - start : high - start]
                if exact and not widens(values.dtype, shard.values.dtype):
                    raise CheckpointError(
                        f"{self.folder}: {name} is {dtype_name(values.dtype)} there and would be "
                        f"rounded to {dtype_name(shard.values.dtype)} here; resume with the "
                        "precision and the launcher that wrote it"
                    )
                shard.values[low - begin : high - begin].copy_(values)
                filled += high - low
        if not known:
            raise self.mismatch(name)
        if filled < size:
            raise CheckpointError(
                f"{self.folder}: {name} has only {filled:,} of {size:,} numbers; "
                "files of some rank are missing: all nodes must write to one file system"
            )

    def mismatch(self, name: str) -> CheckpointError:
        """Name a tensor that the model here has otherwise, or not at all."""
        return CheckpointError(
            f"{self.folder}: {name} does not fit this model: the checkpoint is of another model, "
            "or other weights of it were trained"
        )


def widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a type can represent every number of another."""
    floating = narrow.is_floating_point and wide.is_floating_point
    return narrow == wide or (floating and torch.promote_types(narrow, wide) == wide)
