"""The state of optimizers and plugins as JSON and named tensors, restored exactly.

The JSON holds Python values and scalars. A larger tensor has its type, its shape, its name in the
files, and how it is sharded ("divided"):

`weight`: like its weight; both have the same shape, and are resharded together.
`rows` and `alike`: a DTensor of another shape, sharded by rows, or replicated.
`whole`: a tensor of another shape, where each rank has whole weights.
`rank`: a tensor of another shape, where ranks have shards of the weights; each rank has its own.

Plugins keep plain values, tensors, and slices of the model's shape.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from ..base.errors import CheckpointError, PluginError
from ..base.types import WeightSlice
from ..model.tensor_shards import TensorShard, local_values, shard_of
from .shard_files import ShardReader, dtype_name

STATES = "optimizer"
STATE_DICT_KEYS = ("state", "param_groups")
"""The keys of every optimizer's `state_dict`."""
MAX_JSON_NUMBERS = 4096
"""Numbers of the largest tensor of a parameter group that is stored in the JSON."""
KEYS = bool | int | str
"""Types of a dictionary's keys that JSON holds exactly."""
PLACEMENTS = {"rows": Shard(0), "alike": Replicate()}
RESUME_ALIKE = "resume with the launcher and the number of ranks that wrote it"
PLUGINS = "plugins"
STORABLE = (
    "checkpoints store None, booleans, numbers, text, lists, tuples, dictionaries with text or "
    "whole numbers as keys, tensors and WeightSlice"
)


@dataclass
class Describer:
    """Describes values, and collects the shards of their tensors."""

    rank: int
    device: torch.device
    sharded: bool = False
    """Whether weights are sharded."""
    per_rank: bool = False
    """Whether each rank describes and writes its own state, because the ranks differ."""
    shards: dict[str, TensorShard] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    """Name of a value that cannot be stored -> its type."""

    def value(self, value: Any, name: str, weight: Tensor | None = None) -> Any:
        """Describe a value of the state of a weight, or of a parameter group."""
        if isinstance(value, np.generic):
            return {"numpy": value.dtype.name, "value": value.item()}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return self.tensor(value, name, weight)
        if isinstance(value, list | tuple):
            kind = "tuple" if isinstance(value, tuple) else "list"
            inner = [self.value(item, f"{name}/{n}", weight) for n, item in enumerate(value)]
            return {kind: inner}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {
                "dict": {
                    key: self.value(item, f"{name}/{quote(key, safe='')}", weight)
                    for key, item in value.items()
                }
            }
        if isinstance(value, Mapping) and all(isinstance(key, KEYS) for key in value):
            inner = [
                [key, self.value(item, f"{name}/{n}", weight)]
                for n, (key, item) in enumerate(value.items())
            ]
            return {"pairs": inner}
        return self._object(f"{type(value).__module__}.{type(value).__qualname__}", name)

    def _object(self, kind: str, name: str) -> dict[str, str]:
        self.objects[name] = kind
        return {"object": kind}

    def tensor(self, tensor: Any, name: str, weight: Tensor | None) -> Any:
        """Describe a tensor."""
        if type(tensor) not in (Tensor, torch.nn.Parameter, DTensor):
            return self._object(f"{type(tensor).__module__}.{type(tensor).__qualname__}", name)
        description: dict[str, Any] = {"tensor": dtype_name(tensor.dtype), "shape": [*tensor.shape]}
        where = self.device if weight is None else weight.device
        if tensor.device.type != where.type:
            description["host"] = True
        small = tensor.dim() == 0 or (weight is None and tensor.numel() <= MAX_JSON_NUMBERS)
        if small and not isinstance(tensor, DTensor) and not tensor.is_complex():
            return description | {"values": tensor.tolist()}
        kind = self._sharding_kind(tensor, weight)
        if kind is None:
            return self._object(f"DTensor with {tensor.placements}", name)
        per_rank = kind == "rank" or (self.per_rank and not isinstance(tensor, DTensor))
        stored = f"rank-{self.rank}/{name}" if per_rank else name
        shard = shard_of(tensor.contiguous())
        self.shards[stored] = TensorShard(shard.values, shard.start, shard.shape, per_rank)
        # Its shape differs between ranks, and their descriptions must be equal.
        shape = {"shape": None} if kind == "rank" else {}
        return description | shape | {"divided": kind, "name": name}

    def shared(self, optimizer: Optimizer, folder: str = STATES) -> dict[str, Any]:
        """Describe state that belongs to no parameter."""
        return {
            key: self.value(value, f"{folder}/shared/{key}")
            for key, value in cast("dict[Any, Any]", optimizer.state).items()
            if isinstance(key, str)
        }

    def extra(self, optimizer: Optimizer, folder: str = STATES) -> dict[str, Any]:
        """Describe other entries of an optimizer's `state_dict` than state and groups."""
        if type(optimizer).state_dict is Optimizer.state_dict:
            return {}
        added = {k: v for k, v in optimizer.state_dict().items() if k not in STATE_DICT_KEYS}
        return {key: self.value(value, f"{folder}/extra/{key}") for key, value in added.items()}

    def _sharding_kind(self, tensor: Tensor, weight: Tensor | None) -> str | None:
        if isinstance(tensor, DTensor):
            if (
                isinstance(weight, DTensor)
                and tensor.shape == weight.shape
                and tensor.placements == weight.placements
            ):
                return "weight"
            placement = tensor.placements[0] if len(tensor.placements) == 1 else None
            return next((name for name, known in PLACEMENTS.items() if known == placement), None)
        if self.sharded:
            return "rank"
        return "weight" if weight is not None and tensor.shape == weight.shape else "whole"


@dataclass
class Restorer:
    """Restores values from their descriptions and a checkpoint's tensors."""

    reader: ShardReader
    rank: int
    device: torch.device
    mesh: DeviceMesh | None
    """The ranks over which weights are sharded by rows; None if they are not."""
    same_sharding: bool
    """Whether the weights are sharded as in the checkpoint."""
    per_rank: bool = False
    """Whether each rank has its own description and tensors."""
    flat: bool = False
    """Whether weights are concatenated to flat tensors, and sharded between any two numbers."""
    optimizer: str = ""
    """The optimizer's class, for messages."""

    def value(self, description: Any, where: str, weight: Tensor | None = None) -> Any:
        """Return the described value."""
        if not isinstance(description, Mapping):
            return description
        if "tensor" in description:
            return self.tensor(description, where, weight)
        for kind, make in (("list", list), ("tuple", tuple)):
            if kind in description:
                inner = enumerate(description[kind])
                return make(self.value(item, f"{where}/{n}", weight) for n, item in inner)
        for kind in ("dict", "pairs"):
            if kind in description:
                values = dict(description[kind])
                return {
                    key: self.value(item, f"{where}/{key}", weight) for key, item in values.items()
                }
        if "numpy" in description:
            return np.dtype(description["numpy"]).type(description["value"])
        raise CheckpointError(
            f"{self.reader.folder}: {self.optimizer}'s {where} was a {description['object']}, "
            "which checkpoints cannot store: this optimizer cannot be resumed; start again in "
            "another output folder"
        )

    def tensor(self, description: Mapping[str, Any], where: str, weight: Tensor | None) -> Tensor:
        """Return the described tensor, with its type and on its device."""
        dtype = dtype_named(description["tensor"])
        device = self.device if weight is None else weight.device
        if description.get("host"):
            device = torch.device("cpu")
        if "values" in description:
            values = torch.tensor(description["values"], dtype=dtype, device=device)
            return values.reshape(description["shape"])
        kind, name = description["divided"], description["name"]
        self._ensure_divisible(kind, where)
        per_rank = kind == "rank" or (self.per_rank and kind not in PLACEMENTS and not self.mesh)
        stored = f"rank-{self.rank}/{name}" if per_rank else name
        if kind == "weight":
            assert weight is not None
            if tuple(description["shape"]) != tuple(weight.shape):
                raise self.reader.mismatch(name)
            tensor = torch.empty_like(
                weight, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format
            )
        elif kind in PLACEMENTS and self.mesh is not None:
            tensor = empty_dtensor(
                description["shape"],
                dtype=dtype,
                device_mesh=self.mesh,
                placements=[PLACEMENTS[kind]],
            )
        else:
            shape = self.reader.shape_of(stored) if kind == "rank" else description["shape"]
            tensor = torch.empty(shape, dtype=dtype, device=device)
        if math.prod(tensor.shape):
            self.reader.fill(stored, shard_of(tensor))
        return tensor

    def ensure_class(self, was: str) -> None:
        """Refuse the state of another optimizer."""
        if was != self.optimizer:
            raise CheckpointError(
                f"{self.reader.folder}: the optimizer was {was} and is {self.optimizer}, which "
                "cannot read its state; use the former, or train the model of this checkpoint "
                "(plugsft export makes it) in another output folder"
            )

    def shared(self, description: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Restore state that belongs to no parameter."""
        for key, value in description.items():
            optimizer.state[key] = self.value(value, f"state '{key}'")  # type: ignore[index]

    def extra(self, description: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Restore the entries that an optimizer adds to its `state_dict`."""
        if description:
            added = {key: self.value(value, f"'{key}'") for key, value in description.items()}
            optimizer.load_state_dict(optimizer.state_dict() | added)

    def _ensure_divisible(self, kind: str, where: str) -> None:
        """Refuse a tensor that cannot be resharded exactly like the weights."""
        whole = self.mesh is None and not self.flat
        fits = whole if kind == "whole" else kind != "rank" and not self.flat
        if not (kind == "weight" or self.same_sharding or fits):
            raise CheckpointError(
                f"{self.reader.folder}: {self.optimizer}'s {where} has another shape than its "
                f"weight and cannot be resharded exactly: {RESUME_ALIKE}"
            )


def dtype_named(name: str) -> torch.dtype:
    """Return a type of torch by its name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def is_sharded_like_weight(description: Any) -> bool:
    """Tell whether a description is of a tensor that is sharded like its weight."""
    return isinstance(description, Mapping) and description.get("divided") == "weight"


@dataclass
class PluginDescriber(Describer):
    """Describes the state of plugins; refuses what cannot be stored."""

    weights: Mapping[str, Any] = field(default_factory=dict)
    """The model's parameters by name."""

    def value(self, value: Any, name: str, weight: Tensor | None = None) -> Any:
        """Describe a value of a plugin's state."""
        if isinstance(value, WeightSlice):
            return self._weight_slice(value, name)
        description = super().value(value, name)
        if isinstance(description, Mapping) and "object" in description:
            raise PluginError(f"{_where(name)} is a {description['object']}; {STORABLE}")
        return description

    def tensor(self, tensor: Tensor, name: str, weight: Tensor | None) -> Any:
        """Describe a tensor; a checksum in the description tells whether ranks differ."""
        description = super().tensor(tensor, name, weight)
        return (
            description | {"checksum": _checksum(tensor)} if "name" in description else description
        )

    def _weight_slice(self, weight_slice: WeightSlice, name: str) -> dict[str, Any]:
        if weight_slice.weight not in self.weights:
            raise PluginError(
                f"{_where(name)} is a slice of '{weight_slice.weight}', and the model has no "
                "weight of that name"
            )
        if not isinstance(weight_slice.values, Tensor):
            raise PluginError(f"{_where(name)} is a WeightSlice whose values are no tensor")
        values, parameter = weight_slice.values.detach(), self.weights[weight_slice.weight]
        if values.shape != (shape := local_values(parameter).shape):
            raise PluginError(
                f"{_where(name)} has shape {[*values.shape]}; this rank's slice of "
                f"{weight_slice.weight} has {[*shape]}"
            )
        shard = shard_of(parameter)
        self.shards[name] = TensorShard(values.reshape(-1), shard.start, shard.shape)
        return {
            "weight": weight_slice.weight,
            "tensor": dtype_name(values.dtype),
            "shape": shard.shape,
            "host": values.device.type != self.device.type,
            "name": name,
        }


@dataclass
class PluginRestorer(Restorer):
    """Restores the state of plugins; slices are resharded like their weights."""

    weights: Mapping[str, Any] = field(default_factory=dict)
    """The model's parameters by name."""

    def value(self, description: Any, where: str, weight: Tensor | None = None) -> Any:
        """Return the described value."""
        if isinstance(description, Mapping) and "weight" in description:
            return self._weight_slice(description)
        return super().value(description, where)

    def _weight_slice(self, description: Mapping[str, Any]) -> WeightSlice:
        name = description["weight"]
        if name not in self.weights:
            raise self.reader.mismatch(name)
        shard = shard_of(self.weights[name])
        values = torch.empty_like(
            local_values(self.weights[name]),
            dtype=dtype_named(description["tensor"]),
            device="cpu" if description["host"] else self.device,
            memory_format=torch.contiguous_format,
        )
        self.reader.fill(
            description["name"], TensorShard(values.view(-1), shard.start, shard.shape)
        )
        return WeightSlice(name, values)


def copy_state(state: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """Copy a plugin's state, with `copy(tensor)` for each tensor."""
    if isinstance(state, Tensor):
        return copy(state)
    if isinstance(state, WeightSlice):
        return WeightSlice(state.weight, copy(state.values))
    if isinstance(state, Mapping):
        return {key: copy_state(value, copy) for key, value in state.items()}
    if isinstance(state, list | tuple):
        values = [copy_state(value, copy) for value in state]
        return tuple(values) if isinstance(state, tuple) else values
    return state


def _where(name: str) -> str:
    plugin, _, path = name.removeprefix(f"{PLUGINS}/").partition("/")
    return f"plugin '{plugin}': state_dict()" + (f" at {path}" if path else "")


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return xxhash.xxh3_64(data.data).hexdigest()
