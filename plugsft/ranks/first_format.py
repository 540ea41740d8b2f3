"""Checkpoints of the first format, whose files alone describe their tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..model.tensor_shards import TensorShard
from .optimizer_state import STATES
from .shard_files import ShardReader, dtype_name


def describe_first_format(reader: ShardReader, optimizer: Optimizer) -> dict[str, Any]:
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
    _ensure_complete(reader, states, weights)
    return {"weights": weights, "optimizer": {"states": states}}


def _ensure_complete(
    reader: ShardReader, states: Mapping[str, Mapping[str, Any]], weights: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint of the first format that lacks some state of a parameter."""
    kinds: dict[int, set[str]] = {}
    for name, state in states.items():
        kinds.setdefault(len(weights.get(name, {"shape": ()})["shape"]), set()).update(state)
    for name, state in states.items():
        if missing := kinds[len(weights.get(name, {"shape": ()})["shape"])] - {*state}:
            raise reader.mismatch(f"{STATES}/{name}/{min(missing)}")
