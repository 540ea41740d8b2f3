"""The state of plugins and optimizers as JSON and named tensors, restored exactly.

Nothing is pickled. A tensor like its weight, of equal shape and divided equally, is stored by the
ranges that the ranks hold. Any other must be equal on all ranks; the first one writes it, or a
small one is in the JSON.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import quote

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


@dataclass
class Encoder:
    """Describes values, and collects the shards of their tensors."""

    device: torch.device
    weights: Mapping[str, Any] = field(default_factory=dict)
    """The model's parameters by name: plugins may keep slices of them."""
    shards: dict[str, TensorShard] = field(default_factory=dict)

    def __call__(self, value: Any, name: str, place: Location | None = None) -> Any:
        """Describe a value; `place` is that of its weight, if it belongs to one."""
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, WeightSlice):
            place = self._place_of(value, name)
            return {"slice": [value.weight, self._tensor(value.values, name, place)]}
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, name, place)}
        if isinstance(value, list):
            return [self(item, f"{name}/{n}", place) for n, item in enumerate(value)]
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            items = value.items()
            return {"dict": {key: self(item, inside(name, key), place) for key, item in items}}
        raise unstorable(name, _kind(value))

    def _tensor(self, tensor: Any, name: str, place: Location | None) -> dict[str, Any]:
        if type(tensor) not in TENSORS:
            raise unstorable(name, _kind(tensor))
        if tensor.is_complex() or tensor.layout != torch.strided:
            raise unstorable(name, "tensor that is complex or sparse")
        described: dict[str, Any] = {"dtype": dtype_name(tensor.dtype), "shape": [*tensor.shape]}
        if tensor.device.type != home_of(self.device, place).type:
            described["host"] = True
        if place is not None and _layout(tensor) == _layout(place.like):
            shard = self.shards[name] = place.shard(tensor)
            described |= {"shape": [*shard.shape], "like_weight": True}
        elif isinstance(tensor, DTensor):
            raise unstorable(name, "DTensor of another shape than its weight")
        elif tensor.numel() <= MAX_JSON_NUMBERS:
            described["values"] = tensor.tolist()
        else:
            self.shards[name] = shard_of(tensor.contiguous())
            described["checksum"] = checksum_of(tensor)
        return described

    def _place_of(self, weight_slice: WeightSlice, name: str) -> Location:
        weight, shape = self.weights.get(weight_slice.weight), weight_slice.values.shape
        place = None if weight is None else place_of_slice(weight)
        if place is None:
            raise PluginError(
                f"{where_in(name)} is a slice of '{weight_slice.weight}', and the model has no "
                "weight of that name"
            )
        if shape != place.like.shape:
            raise PluginError(
                f"{where_in(name)} has shape {[*shape]}; this rank's slice of "
                f"{weight_slice.weight} has {[*place.like.shape]}"
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

    def __call__(self, described: Any, name: str, place: Location | None = None) -> Any:
        """Make a value; `name` and `place` are as for the encoder."""
        if isinstance(described, list):
            return [self(item, f"{name}/{n}", place) for n, item in enumerate(described)]
        if not isinstance(described, Mapping):
            return described
        [(kind, content)] = described.items()
        if kind == "dict":
            items = content.items()
            return {key: self(item, inside(name, key), place) for key, item in items}
        if kind == "tensor":
            return self._tensor(content, name, place)
        weight, values = content
        if weight not in self.weights:
            raise self.reader.mismatch(weight)
        place = place_of_slice(self.weights[weight])
        return WeightSlice(weight, self._tensor(values, name, place))

    def _tensor(self, described: Mapping[str, Any], name: str, place: Location | None) -> Tensor:
        dtype, shape = getattr(torch, described["dtype"]), described["shape"]
        device = torch.device("cpu") if described.get("host") else home_of(self.device, place)
        if place is not None and "like_weight" in described:
            like = torch.zeros_like(place.like, dtype=dtype).to(device)
            return self.fill(described, name, place, like)
        if place is not None and shape and not self.same_sharding:
            raise CheckpointError(
                f"{self.reader.folder}: {name} has another shape than its weight "
                f"and cannot be divided otherwise exactly: {RESUME_ALIKE}"
            )
        if "values" in described:
            return torch.tensor(described["values"], dtype=dtype, device=device).reshape(shape)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.reader.fill(name, shard_of(tensor))
        return tensor

    def fill(self, described: Any, name: str, place: Location, tensor: Tensor) -> Tensor:
        """Read a weight's numbers in a tensor like it."""
        shard = place.shard(tensor)
        if [*shard.shape] != described["shape"]:
            raise self.reader.mismatch(name)
        self.reader.fill(name, shard)
        return tensor


def inside(name: str, key: str) -> str:
    """Name what lies under a key; a quoted key has no slash, so that names differ."""
    return f"{name}/{quote(key, safe='')}"


def is_like_weight(described: Any) -> bool:
    """Tell whether a described value is a tensor with a number for each one of its weight."""
    return isinstance(described, Mapping) and "like_weight" in described.get("tensor", ())


def home_of(device: torch.device, place: Location | None) -> torch.device:
    """The device of a tensor that is not described as on the host."""
    home: torch.device = device if place is None else place.like.device
    return home


def unstorable(name: str, kind: str) -> PluginError:
    """Refuse a value that no checkpoint can store."""
    return PluginError(
        f"{where_in(name)} is a {kind}; checkpoints store None, booleans, numbers, text, lists, "
        "dictionaries with text as keys, tensors that are like their weight or equal on all ranks, "
        "and, of a plugin, WeightSlice"
    )


def where_in(name: str) -> str:
    """Say where a value is: its name is "plugins/PLUGIN/KEY" or "optimizer/WEIGHT/KEY"."""
    kind, owner, *path = name.split("/", 2)
    place = "".join(f" at {part}" for part in path)
    if kind.startswith("plugin"):
        return f"plugin '{owner}': state_dict(){place}"
    return f"the optimizer's state of {owner}{place}"


def _layout(tensor: Any) -> Any:
    """A tensor's shape, and which part of it each rank has."""
    return tensor.shape, getattr(tensor, "placements", None)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def checksum_of(tensor: Tensor) -> str:
    """Make a checksum of a tensor's numbers."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return xxhash.xxh3_64(data.data).hexdigest()
