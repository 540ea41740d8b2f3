"""An optimizer's state as JSON and named tensors, restored exactly.

The JSON holds Python values and scalars. A larger tensor has its type, its shape, its name in the
files, and how it is sharded ("divided"):

`weight`: like its weight; both have the same shape, and are resharded together.
`rows` and `alike`: a DTensor of another shape, sharded by rows, or replicated.
`whole`: a tensor of another shape, where each rank has whole weights.
`rank`: a tensor of another shape, where ranks have shards of the weights; each rank has its own.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from ..base.errors import CheckpointError
from ..model.tensor_shards import TensorShard, shard_of
from .shard_files import ShardReader, dtype_name, widens

STATES = "optimizer"
STATE_DICT_KEYS = ("state", "param_groups")
"""The keys of every optimizer's `state_dict`."""
MAX_JSON_NUMBERS = 4096
"""Numbers of the largest tensor of a parameter group that is stored in the JSON."""
PLACEMENTS = {"rows": Shard(0), "alike": Replicate()}
RESUME_ALIKE = "resume with the launcher and the number of ranks that wrote it"


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

    def value(self, value: Any, name: str, weight: Tensor | None = None) -> Any:
        """Describe a value of the state of a weight, or of a parameter group."""
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
        return {"object": f"{type(value).__module__}.{type(value).__qualname__}"}

    def tensor(self, tensor: Tensor, name: str, weight: Tensor | None) -> Any:
        """Describe a tensor."""
        if type(tensor) not in (Tensor, torch.nn.Parameter, DTensor):
            return {"object": f"{type(tensor).__module__}.{type(tensor).__qualname__}"}
        description: dict[str, Any] = {"tensor": dtype_name(tensor.dtype), "shape": [*tensor.shape]}
        where = self.device if weight is None else weight.device
        if tensor.device.type != where.type:
            description["host"] = True
        small = tensor.dim() == 0 or (weight is None and tensor.numel() <= MAX_JSON_NUMBERS)
        if small and not isinstance(tensor, DTensor) and not tensor.is_complex():
            return description | {"values": tensor.tolist()}
        kind = self._sharding_kind(tensor, weight)
        if kind is None:
            return {"object": "DTensor with unknown placements"}
        per_rank = kind == "rank" or (self.per_rank and not isinstance(tensor, DTensor))
        stored = f"rank-{self.rank}/{name}" if per_rank else name
        shard = shard_of(tensor.contiguous())
        self.shards[stored] = TensorShard(shard.values, shard.start, shard.shape, per_rank)
        # Its shape differs between ranks, and their descriptions must be equal.
        shape = {"shape": None} if kind == "rank" else {}
        return description | shape | {"divided": kind, "name": name}

    def shared(self, optimizer: Optimizer) -> dict[str, Any]:
        """Describe state that belongs to no parameter."""
        return {
            key: self.value(value, f"{STATES}/shared/{key}")
            for key, value in cast("dict[Any, Any]", optimizer.state).items()
            if isinstance(key, str)
        }

    def extra(self, optimizer: Optimizer) -> dict[str, Any]:
        """Describe other entries of an optimizer's `state_dict` than state and groups."""
        if type(optimizer).state_dict is Optimizer.state_dict:
            return {}
        added = {k: v for k, v in optimizer.state_dict().items() if k not in STATE_DICT_KEYS}
        return {key: self.value(value, f"{STATES}/extra/{key}") for key, value in added.items()}

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
        if "dict" in description:
            inner = description["dict"].items()
            return {key: self.value(item, f"{where}/{key}", weight) for key, item in inner}
        raise CheckpointError(
            f"{self.reader.folder}: {where} was a {description['object']}, which checkpoints "
            "cannot store: this optimizer cannot be resumed; start again in another output folder"
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

    def ensure_class(self, was: str | None, optimizer: Optimizer) -> None:
        """Refuse the state of another optimizer."""
        if was not in (None, now := type(optimizer).__name__):
            raise CheckpointError(
                f"{self.reader.folder}: the optimizer was {was} and is {now}, which cannot read "
                "its state; use the former, or train the model of this checkpoint (plugsft export "
                "makes it) in another output folder"
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

    def groups(
        self, description: Mapping[str, Any], groups: list[dict[str, Any]], initial: list[Any]
    ) -> None:
        """Restore the values of parameter groups, except settings that the user has changed."""
        if len(description["groups"]) != len(groups):
            raise CheckpointError(
                f"{self.reader.folder}: the optimizer had {len(description['groups'])} parameter "
                f"groups and has {len(groups)}; make the same groups again"
            )
        columns = zip(groups, description["groups"], description["initial"], initial, strict=True)
        for number, (group, saved, initial_then, initial_now) in enumerate(columns):
            for key, value in saved.items():
                # The schedule sets the learning rate at each step.
                if key == "lr":
                    continue
                where = f"'{key}' of parameter group {number}"
                then, now = initial_then.get(key), initial_now.get(key)
                if _equal(then, now):
                    if not _is_object(value):
                        group[key] = _assign(self.value(value, where), group.get(key))
                elif not _equal(value, then):
                    raise CheckpointError(
                        f"{self.reader.folder}: the optimizer's {where} changes in training; its "
                        f"initial value was {then!r} and is {now!r} now; undo that change"
                    )

    def _ensure_divisible(self, kind: str, where: str) -> None:
        """Refuse a tensor that cannot be resharded exactly like the weights."""
        whole = self.mesh is None and not self.flat
        fits = whole if kind == "whole" else kind != "rank" and not self.flat
        if not (kind == "weight" or self.same_sharding or fits):
            raise CheckpointError(
                f"{self.reader.folder}: the optimizer's {where} has another shape than its weight "
                f"and cannot be resharded exactly: {RESUME_ALIKE}"
            )


def dtype_named(name: str) -> torch.dtype:
    """Return a type of torch by its name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def is_sharded_like_weight(description: Any) -> bool:
    """Tell whether a description is of a tensor that is sharded like its weight."""
    return isinstance(description, Mapping) and description.get("divided") == "weight"


def _assign(value: Any, current: Any) -> Any:
    """Return the new value, in the current object if possible: groups may share it."""
    if type(value) is not type(current):
        return value
    if isinstance(value, Tensor) and (value.shape, value.dtype) == (current.shape, current.dtype):
        return current.copy_(value)
    if isinstance(value, list):
        current[:] = value
        return current
    return value


def _equal(first: Any, second: Any) -> bool:
    """Compare two descriptions; NaN equals NaN."""
    return json.dumps(first) == json.dumps(second)


def _is_object(description: Any) -> bool:
    """Tell whether a value is an object, which only the optimizer can build."""
    return isinstance(description, Mapping) and "object" in description


def describe_groups(describer: Describer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Describe the values of parameter groups."""
    return [
        {
            key: describer.value(value, f"{STATES}/groups/{number}/{key}")
            for key, value in group.items()
            if key != "params"
        }
        for number, group in enumerate(groups)
    ]


def follow_weight_dtype(description: Any, was: torch.dtype | None, now: torch.dtype) -> Any:
    """Widen a state's type like its weight's, if both had the same type."""
    if not is_sharded_like_weight(description) or was is None:
        return description
    follows = dtype_named(description["tensor"]) == was and widens(was, now)
    return {**description, "tensor": dtype_name(now)} if follows else description


def old_description(reader: ShardReader, optimizer: Optimizer) -> dict[str, Any]:
    """Describe a checkpoint of the first format from its files alone."""
    # Only with these options does torch put counters on the device.
    fast = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    weights = {
        name: {
            "dtype": dtype_name(reader.dtypes[f"model/{name}"]),
            "shape": reader.shapes[f"model/{name}"],
        }
        for name in sorted(reader.names_of("model"))
    }
    states: dict[str, dict[str, Any]] = {}
    for path in sorted(reader.names_of(STATES)):
        name, _, key = path.rpartition("/")
        stored_name = f"{STATES}/{path}"
        shape = reader.shapes[stored_name]
        entry: dict[str, Any] = {"tensor": dtype_name(reader.dtypes[stored_name]), "shape": shape}
        if not shape:
            value = torch.empty(1, dtype=reader.dtypes[stored_name])
            reader.fill(stored_name, TensorShard(value, 0, ()))
            entry |= {"values": value.item(), "host": not fast}
        else:
            like_weight = name in weights and shape == weights[name]["shape"]
            other = "whole" if reader.writers == 1 else "rank"
            entry |= {"divided": "weight" if like_weight else other, "name": stored_name}
        states.setdefault(name, {})[key] = entry
    ensure_complete(reader, states, weights)
    return {"weights": weights, "optimizer": {"states": states}}


def ensure_complete(
    reader: ShardReader, states: Mapping[str, Mapping[str, Any]], weights: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint of the first format that lacks some state of a parameter."""
    kinds: dict[int, set[str]] = {}
    for name, state in states.items():
        kinds.setdefault(len(weights.get(name, {"shape": ()})["shape"]), set()).update(state)
    for name, state in states.items():
        if missing := kinds[len(weights.get(name, {"shape": ()})["shape"])] - {*state}:
            raise reader.mismatch(f"{STATES}/{name}/{min(missing)}")
