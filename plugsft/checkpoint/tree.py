"""Values as JSON and named tensors, restored exactly. Nothing is pickled.

A tensor like its weight, of equal shape and divided equally, is stored by the ranges that the ranks
hold. Any other must be equal on all ranks; the first one writes it, or a small one is in the JSON.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
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


class Location(NamedTuple):
    """Where this rank's numbers of a weight lie, in any tensor that is like it."""

    like: Any
    """The weight; under ZeRO-3 a flat tensor, which it shares with other weights."""
    shard: Callable[[Any], TensorShard]
    """This rank's shard of the weight in a tensor like that."""


def place_of_slice(weight: Any) -> Location:
    """Where the numbers lie in a plugin's `WeightSlice`: a plain tensor on each rank."""
    shard = shard_of(weight)
    return Location(
        local_values(weight), lambda values: replace(shard, values=values.detach().reshape(-1))
    )


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

    def __call__(self, value: Any, name: str, place: Location | None = None) -> Any:
        """Describe a value; `place` is that of its weight, if it belongs to one."""
        if isinstance(value, np.integer | np.floating | np.bool_):
            return {"numpy": [value.dtype.name, value.item()]}
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, WeightSlice):
            described = self._tensor(value.values, name, self._place_of(value, name))
            return {"slice": [value.weight, described]}
        if isinstance(value, Tensor):
            return self._tensor(value, name, place)
        if isinstance(value, list | tuple):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self(item, f"{name}/{n}", place) for n, item in enumerate(value)]}
        if isinstance(value, Mapping) and all(isinstance(key, KEYS) for key in value):
            items = value.items()
            return {"dict": [[k, self(item, f"{name}/{_part(k)}", place)] for k, item in items]}
        raise Unstorable(name, _kind(value))

    def _tensor(self, tensor: Any, name: str, place: Location | None) -> dict[str, Any]:
        if type(tensor) not in TENSORS:
            raise Unstorable(name, _kind(tensor))
        if tensor.is_complex() or tensor.layout != torch.strided:
            raise Unstorable(name, "tensor that is complex or sparse")
        described: dict[str, Any] = {"dtype": dtype_name(tensor.dtype), "shape": [*tensor.shape]}
        if tensor.device.type != home_of(self.device, place).type:
            described["host"] = True
        if place is not None and _layout(tensor) == _layout(place.like):
            shard = self.shards[name] = place.shard(tensor)
            described |= {"shape": [*shard.shape], "like_weight": name}
        elif isinstance(tensor, DTensor):
            raise Unstorable(name, "DTensor of another shape than its weight")
        elif tensor.numel() <= MAX_JSON_NUMBERS:
            described["values"] = tensor.tolist()
        else:
            self.shards[name] = shard_of(tensor.contiguous())
            described |= {"on_each_rank": name, "checksum": _checksum(tensor)}
        return {"tensor": described}

    def _place_of(self, weight_slice: WeightSlice, name: str) -> Location:
        weight, shape = weight_slice.weight, weight_slice.values.shape
        if weight not in self.weights:
            raise PluginError(
                f"{where_in_plugin(name)} is a slice of '{weight}', and the model has no weight of "
                "that name"
            )
        place = place_of_slice(self.weights[weight])
        if shape != place.like.shape:
            raise PluginError(
                f"{where_in_plugin(name)} has shape {[*shape]}; this rank's slice of "
                f"{weight} has {[*place.like.shape]}"
            )
        return place


@dataclass
class Decoder:
    """Makes described values again."""

    reader: ShardReader
    device: torch.device
    weights: Mapping[str, Any]
    """The model's parameters by name."""
    same_sharding: bool
    """Whether the weights are divided as in the checkpoint."""

    def __call__(self, described: Any, where: str, place: Location | None = None) -> Any:
        """Make a value; `where` names it in errors, `place` is as for the encoder."""
        if not isinstance(described, Mapping):
            return described
        [(kind, content)] = described.items()  # a dictionary is a list of pairs below "dict"
        if kind == "tensor":
            return self._tensor(content, where, place)
        if kind == "slice":
            name, values = content
            if name not in self.weights:
                raise self.reader.mismatch(name)
            return WeightSlice(name, self(values, where, place_of_slice(self.weights[name])))
        if kind == "numpy":
            dtype, value = content
            return np.dtype(dtype).type(value)
        if kind == "dict":
            return {key: self(item, f"{where}/{key}", place) for key, item in content}
        values = [self(item, f"{where}/{n}", place) for n, item in enumerate(content)]
        return tuple(values) if kind == "tuple" else values

    def _tensor(self, described: Mapping[str, Any], where: str, place: Location | None) -> Tensor:
        dtype, shape = getattr(torch, described["dtype"]), described["shape"]
        device = torch.device("cpu") if described.get("host") else home_of(self.device, place)
        if place is not None and "like_weight" in described:
            like = torch.zeros_like(
                place.like,
                dtype=dtype,
                requires_grad=False,
                memory_format=torch.contiguous_format,
            )
            return self.fill(described, place, like.to(device))
        if place is not None and shape and not self.same_sharding:
            raise CheckpointError(
                f"{self.reader.folder}: {where} has another shape than its weight "
                f"and cannot be divided otherwise exactly: {RESUME_ALIKE}"
            )
        if "values" in described:
            return torch.tensor(described["values"], dtype=dtype, device=device).reshape(shape)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.reader.fill(described["on_each_rank"], shard_of(tensor))
        return tensor

    def fill(self, described: Mapping[str, Any], place: Location, tensor: Tensor) -> Tensor:
        """Read a weight's numbers in a tensor like it."""
        shard, name = place.shard(tensor), described["like_weight"]
        if [*shard.shape] != described["shape"]:
            raise self.reader.mismatch(name)
        self.reader.fill(name, shard)
        return tensor


def is_like_weight(described: Any) -> bool:
    """Tell whether a described value is a tensor with a number for each one of its weight."""
    return isinstance(described, Mapping) and "like_weight" in described.get("tensor", ())


def home_of(device: torch.device, place: Location | None) -> torch.device:
    """The device of a tensor that is not described as on the host."""
    home: torch.device = device if place is None else place.like.device
    return home


def where_in_plugin(name: str) -> str:
    """Say where in a plugin's state a value is: its name begins with "plugins/"."""
    _, plugin, *path = name.split("/", 2)
    return f"plugin '{plugin}': state_dict()" + "".join(f" at {part}" for part in path)


def _part(key: Any) -> str:
    """Write a key as a part of a tensor's name: 1 and "1" differ."""
    return quote(key, safe="") if isinstance(key, str) else f"#{key}"


def _layout(tensor: Any) -> Any:
    """A tensor's shape, and which part of it each rank has."""
    return tensor.shape, getattr(tensor, "placements", None)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return xxhash.xxh3_64(data.data).hexdigest()
