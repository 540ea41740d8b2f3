"""This rank's shard of a model and its optimizer, saved and restored under any launcher."""

import importlib
import json
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from ..base.console import say
from ..base.errors import CheckpointError
from ..model.tensor_shards import Part, part_of
from .optimizer_state import (
    CURE,
    STATES,
    Describer,
    Restorer,
    describe_groups,
    dtype_named,
    is_divided,
    old_description,
    widened,
)
from .shard_files import Stored, dtype_name

WEIGHTS = "model"


class TrainState:
    """This rank's shard of a model and its optimizer: whole tensors, or rows under FSDP2."""

    joined = False
    """Whether weights are joined, and sharded without regard to rows."""

    def __init__(self, accelerator: Accelerator, model: Module, optimizer: Any) -> None:
        self.rank, self.optimizer = accelerator.process_index, optimizer
        self.ranks, self._device = accelerator.num_processes, accelerator.device
        self._wrapped, self.plain = model, accelerator.unwrap_model(model)
        # The groups before training: tells the user's settings from values that training changes.
        self._initial = describe_groups(Describer(self.rank, self._device), self._base.param_groups)

    @property
    def _base(self) -> Optimizer:
        """The optimizer that updates the weights."""
        base: Optimizer = self.optimizer
        return base

    def parameters(self, trained: bool = True) -> dict[str, Any]:
        """Return the parameters, or those that are trained, by their names in the plain model."""
        for module in self._wrapped.modules():
            if isinstance(module, FSDPModule):
                # After an evaluation the last modules are still gathered.
                module.reshard()
        named = self.plain.named_parameters()
        return {name: one for name, one in named if one.requires_grad or not trained}

    def sharding(self) -> dict[str, Any]:
        """Describe how tensors are sharded; under the same sharding all state can be restored."""
        return {"kind": "whole" if self._mesh() is None else "rows", "ranks": self.ranks}

    def describe(self, own: bool = False) -> tuple[dict[str, Any], dict[str, Part]]:
        """Describe trained weights and optimizer state; return their parts, too.

        With `own`, each rank writes its own copy of unsharded state.
        """
        sharded = self.sharding()["kind"] != "whole"
        describer, weights = Describer(self.rank, self._device, sharded, own), {}
        for name, one in self.parameters().items():
            part = describer.parts[f"{WEIGHTS}/{name}"] = self.part(one)
            weights[name] = {"dtype": dtype_name(part.values.dtype), "shape": part.shape}
        optimizer = {
            "class": type(self._base).__name__,
            "states": self._states(describer),
            "groups": describe_groups(describer, self._base.param_groups),
            "initial": self._initial,
            "shared": describer.shared(self._base),
            "extra": describer.extra(self._base),
        }
        return {"weights": weights, "optimizer": optimizer}, describer.parts

    def restore(
        self, stored: Stored, described: dict[str, Any] | None, same: bool, own: bool
    ) -> None:
        """Restore model and optimizer from a checkpoint; no rank waits for another.

        A checkpoint of the first format has no description. `same`: tensors are sharded as in the
        checkpoint. `own`: the description is only this rank's.
        """
        described, named = described or old_description(stored, self._base), self.parameters()
        ensure_same(stored, named, {*described["weights"]})
        restorer = Restorer(
            stored, self.rank, self._device, self._mesh(), same, own, joined=self.joined
        )
        optimizer = described["optimizer"]
        restorer.ensure_class(optimizer.get("class"), self._base)
        with torch.no_grad():
            self._fill_weights(stored, named)
            types = {name: dtype_named(one["dtype"]) for name, one in described["weights"].items()}
            restorer.extra(optimizer.get("extra", {}), self._base)
            self._fill_states(restorer, optimizer["states"], types)
            restorer.shared(optimizer.get("shared", {}), self._base)
            if "groups" in optimizer:
                restorer.groups(optimizer, self._base.param_groups, self._initial)
        now = {name: self.part(one).values.dtype for name, one in named.items()}
        if changed := {(types[name], now[name]) for name in named if types[name] != now[name]}:
            was, becomes = next(iter(changed))
            say(
                f"checkpoint: its weights are {dtype_name(was)} and resume in "
                f"{dtype_name(becomes)}, as do optimizer states of the same type"
            )

    def hand_out(self, stored: Stored) -> None:
        """Update other copies of the restored weights; all ranks together."""

    def part(self, one: Any) -> Part:
        """Return this rank's part of a parameter."""
        return part_of(one)

    def whole(self, one: Any) -> Tensor:
        """Return all of a parameter; all ranks ask for it together."""
        return one.full_tensor() if isinstance(one, DTensor) else one.detach()

    def _mesh(self) -> Any:
        sharded = (one for one in self.plain.parameters() if isinstance(one, DTensor))
        first = next(sharded, None)
        return None if first is None else first.device_mesh

    def _states(self, describer: Describer) -> dict[str, Any]:
        states, names = {}, self.parameters(trained=False).items()
        for name, one in names:
            if state := self._base.state.get(one):
                where = f"{STATES}/{name}"
                states[name] = {
                    key: describer.value(value, f"{where}/{key}", one)
                    for key, value in state.items()
                }
        return states

    def _fill_weights(self, stored: Stored, named: dict[str, Any]) -> None:
        fill_weights(stored, named)

    def _fill_states(
        self, restorer: Restorer, states: dict[str, Any], types: dict[str, torch.dtype]
    ) -> None:
        named = self.parameters(trained=False)
        if strange := {*states} - {*named}:
            raise restorer.stored.strange(f"{STATES}/{min(strange)}")
        for name, one in named.items():
            self._base.state.pop(one, None)
            if name in states:
                self._base.state[one] = {
                    key: restorer.value(
                        widened(value, types.get(name), one.dtype), key_of(name, key), one
                    )
                    for key, value in states[name].items()
                }


def key_of(name: str, key: str) -> str:
    """Name a state of a parameter."""
    return f"state '{key}' of {name}"


def ensure_same(stored: Stored, named: dict[str, Any], weights: set[str]) -> None:
    """Refuse a checkpoint in which other parameters were trained."""
    if differing := {*named} ^ weights:
        raise stored.strange(min(differing))


def fill_weights(stored: Stored, named: dict[str, Any], exact: bool = True) -> None:
    """Read whole parameters, or under FSDP2 this rank's rows."""
    for name, one in named.items():
        stored.fill(f"{WEIGHTS}/{name}", part_of(one), exact)


class ZeroTrainState(TrainState):
    """DeepSpeed's shards: equal parts of each flat tensor, the last one padded, in float32.

    The forward pass reads other copies, in the model's type; small ones are whole on each rank.
    """

    joined = True

    def __init__(self, accelerator: Accelerator, model: Module, optimizer: Any) -> None:
        self._zero = optimizer.optimizer
        self._deepspeed: Any = importlib.import_module("deepspeed")
        self._access = self._deepspeed.utils
        super().__init__(accelerator, model, optimizer)

    @property
    def _base(self) -> Optimizer:
        base: Optimizer = self._zero.optimizer
        return base

    def sharding(self) -> dict[str, Any]:
        """Describe how tensors are sharded; under the same sharding all state can be restored."""
        joined = [one.numel() for one in self._zero.fp32_partitioned_groups_flat]
        return {"kind": "numbers", "ranks": self.ranks, "joined": joined}

    def part(self, one: Any) -> Part:
        """Return this rank's part of a parameter."""
        trained = one.requires_grad
        return self._mine(
            one, self._access.safe_get_local_fp32_param(one) if trained else one.ds_tensor
        )

    def whole(self, one: Any) -> Tensor:
        """Return all of a parameter; all ranks ask for it together."""
        if one.requires_grad:
            return self._access.safe_get_full_fp32_param(one)  # type: ignore[no-any-return]
        with self._deepspeed.zero.GatheredParameters([one]):
            return one.detach().clone()  # type: ignore[no-any-return]

    def hand_out(self, stored: Stored) -> None:
        """Update other copies of the restored weights; all ranks together."""
        for name, one in self.parameters().items():
            with (
                torch.no_grad(),
                self._deepspeed.zero.GatheredParameters([one], modifier_rank=0),
            ):
                if self.rank == 0:
                    stored.fill(f"{WEIGHTS}/{name}", part_of(one.data), exact=False)

    def _joined_of(self, one: Any) -> tuple[int, Tensor]:
        """Return the number and values of the joined tensor of a parameter."""
        number = self._zero.grad_position[self._zero.get_param_id(one)][0]
        return number, self._zero.fp32_partitioned_groups_flat[number]

    def _states(self, describer: Describer) -> dict[str, Any]:
        states = {}
        for name, one in self.parameters().items():
            number, joined = self._joined_of(one)
            states[name] = {
                key: self._described(describer, name, key, value, joined, one)
                if isinstance(value, Tensor) and value.shape == joined.shape
                else describer.value(value, f"{STATES}/joined-{number}/{key}", joined)
                for key, value in self._base.state.get(joined, {}).items()
            }
        return states

    def _described(
        self, describer: Describer, name: str, key: str, value: Tensor, joined: Tensor, one: Any
    ) -> dict[str, Any]:
        """Describe a state with the shape of its parameter."""
        stored = f"{STATES}/{name}/{key}"
        read = self._access.safe_get_local_optimizer_state
        part = describer.parts[stored] = self._mine(one, read(one, key))
        return {
            "tensor": dtype_name(value.dtype),
            "shape": part.shape,
            "divided": "weight",
            "name": stored,
        }

    def _fill_weights(self, stored: Stored, named: dict[str, Any]) -> None:
        for name, one in named.items():
            values = torch.zeros_like(one.ds_tensor, dtype=torch.float32)
            stored.fill(f"{WEIGHTS}/{name}", self._mine(one, values))
            self._access.safe_set_local_fp32_param(one, values)

    def _fill_states(
        self, restorer: Restorer, states: dict[str, Any], types: dict[str, torch.dtype]
    ) -> None:
        groups: dict[int, dict[str, Any]] = {}
        seen: set[int] = set()
        for name, one in self.parameters().items():
            number, joined = self._joined_of(one)
            state = {
                key: widened(value, types[name], torch.float32)
                for key, value in states.get(name, {}).items()
            }
            counts = {k: None if is_divided(value) else value for k, value in state.items()}
            if json.dumps(groups.setdefault(number, counts)) != json.dumps(counts):
                raise CheckpointError(
                    f"{restorer.stored.folder}: the optimizer's state of {name} differs from that "
                    f"of other weights, and under ZeRO-3 they share it; {CURE}"
                )
            if number not in seen:
                seen.add(number)
                self._base.state[joined] = {}
            whole = self._base.state[joined]
            for key, value in state.items():
                if not is_divided(value):
                    whole[key] = restorer.value(value, key_of(name, key), joined)
                    continue
                dtype = dtype_named(value["tensor"])
                if key not in whole:
                    whole[key] = torch.zeros_like(joined, dtype=dtype)
                values = torch.zeros_like(one.ds_tensor, dtype=dtype)
                restorer.stored.fill(value["name"], self._mine(one, values))
                self._access.safe_set_local_optimizer_state(one, values, key)

    def _mine(self, one: Any, values: Tensor) -> Part:
        start = self.rank * one.ds_tensor.ds_numel
        here = max(0, min(values.numel(), one.ds_numel - start))
        return Part(values[:here], start, tuple(one.ds_shape))


def train_state_of(accelerator: Accelerator, model: Module, optimizer: Any) -> TrainState:
    """Return this rank's shard of model and optimizer."""
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    return (ZeroTrainState if zero else TrainState)(accelerator, model, optimizer)
