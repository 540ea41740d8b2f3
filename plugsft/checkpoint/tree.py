"""Values as JSON and named tensors, restored exactly. Nothing is pickled.

A tensor like its weight, of equal shape and divided equally, is stored by the ranges that the ranks
hold. Any other must be equal on all ranks; the first one writes it, or a small one is in the JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..base.errors import CheckpointError, PluginError
from ..base.types import WeightSlice
from ..model.tensor_shards import (
    TensorShard,
    dtype_name,
    dtype_named,
    local_values,
    shard_of,
)
from .files import ShardReader

MAX_JSON_NUMBERS = 256
"""Numbers of the largest tensor that is stored in the JSON."""
PLAIN = bool | int | float | str | None
KEYS = bool | int | str
"""Types of a dictionary's keys that JSON holds exactly, in a list of pairs."""
TENSORS = (Tensor, torch.nn.Parameter, DTensor)
"""Types of tensors that are stored; subclasses may hold more than their numbers."""
RESUME_ALIKE = "resume with the launcher and the number of ranks that wrote it"


class Unstorable(Exception):
    """A value that no checkpoint can store."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind


@dataclass
class Encoder:
    """Describes values, and collects the shards of their tensors."""

    device: torch.device
    weights: Mapping[str, Any] = field(default_factory=dict)
    """The model's parameters by name: plugins may keep slices of them."""
    shards: dict[str, TensorShard] = field(default_factory=dict)

    def __call__(self, value: Any, name: str, slot: Any = None) -> Any:
        """Describe a value; `slot` is given if it belongs to the state of a weight."""
        if isinstance(value, np.generic):
            return {"numpy": [value.dtype.name, value.item()]}
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, WeightSlice):
            return self._weight_slice(value, name)
        if isinstance(value, Tensor):
            return self._tensor(value, name, slot)
        if isinstance(value, list | tuple):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self(item, f"{name}/{n}", slot) for n, item in enumerate(value)]}
        if isinstance(value, Mapping) and all(isinstance(key, KEYS) for key in value):
            pairs = [[key, self(item, f"{name}/{_part(key)}", slot)] for key, item in value.items()]
            return {"dict": pairs}
        raise Unstorable(name, _kind(value))

    def _tensor(self, tensor: Any, name: str, slot: Any) -> dict[str, Any]:
        if type(tensor) not in TENSORS:
            raise Unstorable(name, _kind(tensor))
        described: dict[str, Any] = {"tensor": dtype_name(tensor.dtype), "shape": [*tensor.shape]}
        if tensor.device.type != (self.device if slot is None else slot.tensor.device).type:
            described["host"] = True
        if slot is not None and _is_like(tensor, slot.tensor):
            shard = self.shards[name] = slot.part(tensor)
            return described | {"shape": [*shard.shape], "like_weight": name}
        if isinstance(tensor, DTensor):
            raise Unstorable(name, "DTensor of another shape than its weight")
        if tensor.numel() <= MAX_JSON_NUMBERS and not tensor.is_complex():
            return described | {"values": tensor.tolist()}
        self.shards[name] = shard_of(tensor.contiguous())
        return described | {"whole": name, "checksum": _checksum(tensor)}

    def _weight_slice(self, weight_slice: WeightSlice, name: str) -> dict[str, Any]:
        weight, values = weight_slice.weight, weight_slice.values
        if weight not in self.weights:
            raise PluginError(
                f"{where_in_plugin(name)} is a slice of '{weight}', and the model has no weight of "
                "that name"
            )
        if values.shape != (shape := local_values(self.weights[weight]).shape):
            raise PluginError(
                f"{where_in_plugin(name)} has shape {[*values.shape]}; this rank's slice of "
                f"{weight} has {[*shape]}"
            )
        shard = shard_of(self.weights[weight])
        self.shards[name] = TensorShard(values.detach().reshape(-1), shard.start, shard.shape)
        host = values.device.type != self.device.type
        return {"slice": name, "of": weight, "dtype": dtype_name(values.dtype), "host": host}


@dataclass
class Decoder:
    """Makes described values again."""

    reader: ShardReader
    device: torch.device
    weights: Mapping[str, Any]
    """The model's parameters by name."""
    same_sharding: bool
    """Whether the weights are divided as in the checkpoint."""

    def __call__(self, described: Any, where: str, slot: Any = None) -> Any:
        """Make a value; `where` names it in errors, `slot` is as for the encoder."""
        if not isinstance(described, Mapping):
            return described
        if "tensor" in described:
            return self._tensor(described, where, slot)
        if "slice" in described:
            return self._weight_slice(described)
        [(kind, items)] = described.items()
        if kind == "numpy":
            dtype, value = items
            return np.dtype(dtype).type(value)
        if kind == "dict":
            return {key: self(item, f"{where}/{key}", slot) for key, item in items}
        values = [self(item, f"{where}/{n}", slot) for n, item in enumerate(items)]
        return tuple(values) if kind == "tuple" else values

    def fill(self, described: Mapping[str, Any], slot: Any, tensor: Tensor) -> Tensor:
        """Read a weight's part of a state like it."""
        shard, name = slot.part(tensor), described["like_weight"]
        if [*shard.shape] != described["shape"]:
            raise self.reader.mismatch(name)
        self.reader.fill(name, shard)
        return tensor

    def _tensor(self, described: Mapping[str, Any], where: str, slot: Any) -> Tensor:
        dtype, shape = dtype_named(described["tensor"]), described["shape"]
        if "like_weight" in described:
            tensor = torch.zeros_like(
                slot.tensor,
                dtype=dtype,
                requires_grad=False,
                memory_format=torch.contiguous_format,
            )
            return self.fill(described, slot, tensor)
        if slot is not None and shape and not self.same_sharding:
            raise CheckpointError(
                f"{self.reader.folder}: {where} has another shape than its weight "
                f"and cannot be divided otherwise exactly: {RESUME_ALIKE}"
            )
        device = self.device if slot is None else slot.tensor.device
        device = torch.device("cpu") if described.get("host") else device
        if "values" in described:
            return torch.tensor(described["values"], dtype=dtype, device=device).reshape(shape)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.reader.fill(described["whole"], shard_of(tensor))
        return tensor

    def _weight_slice(self, described: Mapping[str, Any]) -> WeightSlice:
        name = described["of"]
        if name not in self.weights:
            raise self.reader.mismatch(name)
        shard = shard_of(self.weights[name])
        values = torch.empty_like(
            local_values(self.weights[name]),
            dtype=dtype_named(described["dtype"]),
            device="cpu" if described["host"] else self.device,
            memory_format=torch.contiguous_format,
        )
        self.reader.fill(described["slice"], TensorShard(values.view(-1), shard.start, shard.shape))
        return WeightSlice(name, values)


def where_in_plugin(name: str) -> str:
    """Say where in a plugin's state a value is: its name begins with "plugins/"."""
    _, plugin, *path = name.split("/", 2)
    return f"plugin '{plugin}': state_dict()" + "".join(f" at {part}" for part in path)


def _part(key: Any) -> str:
    """Write a key as a part of a tensor's name: 1 and "1" differ."""
    return quote(key, safe="") if isinstance(key, str) else f"#{key}"


def _is_like(tensor: Any, weight: Any) -> bool:
    """Whether a tensor has its weight's shape, and the ranks the same parts of both."""
    parts, of_weight = (getattr(it, "placements", None) for it in (tensor, weight))
    return tensor.shape == weight.shape and parts == of_weight


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return xxhash.xxh3_64(data.data).hexdigest()
