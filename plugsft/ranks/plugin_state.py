"""The state of plugins in checkpoints: plain values, tensors, and slices of the model's shape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..base.errors import PluginError
from ..base.types import WeightSlice
from ..model.tensor_shards import TensorShard, local_values, shard_of
from .optimizer_state import Describer, Restorer, dtype_named
from .shard_files import dtype_name

PLUGINS = "plugins"
STORABLE = (
    "checkpoints store None, booleans, numbers, text, lists, tuples, dictionaries with text or "
    "whole numbers as keys, tensors and WeightSlice"
)


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
