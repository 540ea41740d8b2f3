"""This rank's shard of model and optimizer, saved and restored under any strategy.

The scale of the loss belongs to it: without one, gradients below 6e-8 are zero in float16. The loss
is multiplied by a power of two, and the gradients are divided by it before anything reads them. If
a gradient overflows, the optimizer skips the step, and the scale halves. It doubles after 2,000
steps without an overflow, as torch's GradScaler does; but nothing here waits for the device.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ..base.console import say
from ..base.errors import PluginError, TrainError
from ..model.tensor_shards import TensorShard, local_values, shard_of
from ..recipe.tables import short
from .param_groups import (
    describe_optimizer,
    describe_states,
    describe_values,
    optimizers_in,
    restore_states,
    restore_values,
)
from .shard_files import ShardReader
from .states import PLUGINS, STATES, Describer, PluginDescriber, PluginRestorer, Restorer

INITIAL, PATIENCE = 2.0**16, 2_000
"""The first scale, and the steps without an overflow after which it doubles."""
MANY = 8
"""Skipped steps in a row that are worth a warning."""
WEIGHTS = "model"


class LossScale:
    """The scale of the loss, the same on all ranks; 1 but for float16."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.on, device = accelerator.mixed_precision == "fp16", accelerator.device
        self.factor: Any = torch.full((), INITIAL, device=device) if self.on else 1
        self._steps = torch.zeros((), dtype=torch.int32, device=device)
        """Steps since the last overflow or doubling."""
        self.skipped = self._in_a_row = 0

    def unscale(self, parameters: Iterable[Parameter]) -> None:
        """Divide gradients by the scale, which is exact."""
        if self.on:
            gradients = [local_values(it.grad) for it in parameters if it.grad is not None]
            torch._foreach_mul_(gradients, 1 / self.factor)

    def update(self, overflowed: Tensor) -> None:
        """Halve the scale after an overflow (1), or double it after many steps without (0)."""
        if self.on:
            torch._amp_update_scale_(self.factor, self._steps, overflowed, 2.0, 0.5, PATIENCE)

    def count(self, step: int, scale: float, grad_norm: float) -> dict[str, float]:
        """Count a step whose numbers are read; return its metrics."""
        overflowed = not math.isfinite(grad_norm)
        self.skipped += overflowed
        self._in_a_row = overflowed * (self._in_a_row + 1)
        if overflowed and scale <= 1:
            raise TrainError(
                f"step {step}: gradients overflow float16 even without loss scaling; "
                f"{self._in_a_row} steps in a row were skipped. Set model.dtype = "
                '"bfloat16" or "float32", or a lower train.learning_rate'
            )
        if self._in_a_row == MANY:
            what = f"{MANY} steps in a row are skipped, as gradients overflow float16"
            say(f"warning: step {step}: {what}; the loss scale is now {scale / 2:g}")
        return {"loss_scale": scale, "skipped_steps": self.skipped} if self.on else {}

    def state(self) -> dict[str, float]:
        """Return what checkpoints save."""
        factor, steps = float(self.factor), int(self._steps)
        return {"scale": factor, "steps": steps, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what a checkpoint saved."""
        if self.on:
            self.factor.fill_(state["scale"])
            self._steps.fill_(state["steps"])
            self.skipped = state["skipped"]


class TrainState:
    """This rank's shard of a model and its optimizer: whole tensors, or rows under FSDP2."""

    flat = False
    """Whether weights are concatenated to flat tensors, and sharded between any two numbers."""

    def __init__(self, accelerator: Accelerator, model: Module, optimizer: Any) -> None:
        self.rank, self.optimizer = accelerator.process_index, optimizer
        self.ranks, self._device = accelerator.num_processes, accelerator.device
        self._wrapped, self.plain = model, accelerator.unwrap_model(model)
        self._warned = False
        self.loss_scale = LossScale(accelerator)
        # Compared on resuming, to tell the user's changes from those of training.
        self._initial = [
            describe_values(Describer(self.rank, self._device), optimizer)
            for optimizer in optimizers_in(self._base)
        ]

    @property
    def _base(self) -> Optimizer:
        """The optimizer that updates the weights."""
        base: Optimizer = self.optimizer
        return base

    def parameters(self, trained: bool = True) -> dict[str, Any]:
        """Return the trained parameters, or all, by their names in the plain model."""
        for module in self._wrapped.modules():
            if isinstance(module, FSDPModule):
                # After an evaluation the last modules are still gathered.
                module.reshard()
        named = self.plain.named_parameters()
        return {
            name: parameter for name, parameter in named if parameter.requires_grad or not trained
        }

    def sharding(self) -> dict[str, Any]:
        """Describe the sharding; a run with an equal description can restore all state."""
        return {"kind": "whole" if self._mesh() is None else "rows", "ranks": self.ranks}

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's part of each trained weight, in float32 and by name.

        A part is the whole weight in one process and under DDP, rows under FSDP2, and flat numbers
        under ZeRO-3. It may be a view, which training changes: clone it to keep it, and write with
        `set_shards`.
        """
        named = self.parameters()
        return {name: self.local(parameter).float() for name, parameter in named.items()}

    def set_shards(self, shards: Mapping[str, Tensor]) -> None:
        """Write parts of weights, as `shards` returns them; all ranks call it alike."""
        named = self.parameters()
        with torch.no_grad():
            for name, values in shards.items():
                self._set_local(named[name], values)
        self._update_copies()

    def ensure_fitting(self, shards: Mapping[str, Tensor]) -> None:
        """Refuse parts of weights that `set_shards` cannot write; nothing is written yet."""
        named = self.parameters()
        for name, values in shards.items():
            if name not in named:
                raise PluginError(f"'{name}' is no trained weight of the model")
            if not isinstance(values, Tensor):
                raise PluginError(f"{name}: a part is a tensor, not {short(values)}")
            if values.shape != (shape := self.local(named[name]).shape):
                raise PluginError(
                    f"{name}: this rank's part has shape {[*shape]}, not {[*values.shape]}"
                )

    def local(self, parameter: Any) -> Tensor:
        """Return this rank's part of a trained parameter; a view where possible."""
        return local_values(parameter)

    def _set_local(self, parameter: Any, values: Tensor) -> None:
        local_values(parameter).copy_(values)

    def _update_copies(self) -> None:
        """Update what the forward pass computes with, where it is a copy of the weights."""

    def describe(
        self, per_rank: bool = False, plugin_states: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, TensorShard]]:
        """Describe trained weights, optimizer and plugins; return the description and shards.

        `plugin_states`: plugin -> its state: plain values and tensors, the same on all ranks, and
        `WeightSlice`. With `per_rank`, each rank writes its own copy of unsharded state.
        """
        sharded = self.sharding()["kind"] != "whole"
        describer, named = Describer(self.rank, self._device, sharded, per_rank), self.parameters()
        for name, parameter in named.items():
            describer.shards[f"{WEIGHTS}/{name}"] = self.shard(parameter)
        optimizer = self._describe_optimizers(describer)
        self._warn_of_objects(describer)
        plugins = PluginDescriber(
            self.rank, self._device, per_rank=per_rank, weights=self.parameters(trained=False)
        )
        described = {
            name: plugins.value(state, f"{PLUGINS}/{name}")
            for name, state in (plugin_states or {}).items()
        }
        description = {"weights": [*named], "optimizer": optimizer, "plugin_states": described}
        description["loss_scale"] = self.loss_scale.state()
        return description, describer.shards | plugins.shards

    def _warn_of_objects(self, describer: Describer) -> None:
        """Say once what of the optimizer's state no checkpoint can store."""
        # An object in a group is a setting, which the optimizer gets again when it is made.
        lost = [name for name in describer.objects if "/groups/" not in name]
        if lost and not self._warned:
            self._warned = True
            owner, name = type(self._base).__name__, lost[0].removeprefix(f"{STATES}/")
            say(
                f"warning: checkpoints of this run cannot be resumed: {owner}'s {name} is a "
                f"{describer.objects[lost[0]]}, which they cannot store"
            )

    def restore(
        self, reader: ShardReader, description: dict[str, Any], same_sharding: bool, per_rank: bool
    ) -> dict[str, Any]:
        """Restore model and optimizer from a checkpoint; return the state of its plugins.

        It has no collectives. `same_sharding`: tensors are sharded as in the checkpoint.
        `per_rank`: each rank has its own description.
        """
        named = self.parameters()
        ensure_same_parameters(reader, named, {*description["weights"]})
        restorer = Restorer(
            reader, self.rank, self._device, self._mesh(), same_sharding, per_rank, self.flat
        )
        with torch.no_grad():
            self._restore_weights(reader, named)
            self._update_copies()
            self._restore_optimizers(restorer, description["optimizer"])
        self.loss_scale.restore(description.get("loss_scale", {}))
        weights, described = self.parameters(trained=False), description["plugin_states"]
        plugins = PluginRestorer(
            reader, self.rank, self._device, None, True, per_rank, weights=weights
        )
        return {name: plugins.value(it, f"{PLUGINS}/{name}") for name, it in described.items()}

    def shard(self, parameter: Any) -> TensorShard:
        """Return this rank's shard of a parameter."""
        return shard_of(parameter)

    def whole(self, parameter: Any) -> Tensor:
        """Gather a whole parameter; a collective."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()

    def _mesh(self) -> Any:
        meshes = (it.device_mesh for it in self.plain.parameters() if isinstance(it, DTensor))
        return next(meshes, None)

    def _describe_optimizers(self, describer: Describer) -> dict[str, Any]:
        base, *inner = optimizers_in(self._base)
        described = []
        for number, optimizer in enumerate(inner):
            folder = f"{STATES}/inner-{number}"
            states = describe_states(describer, optimizer, self.parameters(trained=False), folder)
            initial = self._initial[number + 1]
            described.append(describe_optimizer(describer, optimizer, states, initial, folder))
        states = self._describe_states(describer)
        return describe_optimizer(describer, base, states, self._initial[0]) | {"inner": described}

    def _describe_states(self, describer: Describer) -> dict[str, Any]:
        return describe_states(describer, self._base, self.parameters(trained=False))

    def _restore_weights(self, reader: ShardReader, named: dict[str, Any]) -> None:
        fill_weights(reader, named)

    def _restore_optimizers(self, restorer: Restorer, saved: dict[str, Any]) -> None:
        optimizers, parts = optimizers_in(self._base), [saved, *saved["inner"]]
        if len(optimizers) != len(parts):
            raise restorer.reader.mismatch(STATES)
        for number, (optimizer, part) in enumerate(zip(optimizers, parts, strict=True)):
            own = replace(restorer, optimizer=type(optimizer).__name__)
            own.ensure_class(part["class"])
            own.extra(part["extra"], optimizer)
            if number == 0:
                self._restore_states(own, part["states"])
            else:
                restore_states(own, optimizer, self.parameters(trained=False), part["states"])
            own.shared(part["shared"], optimizer)
            restore_values(own, part, optimizer, self._initial[number])

    def _restore_states(self, restorer: Restorer, states: dict[str, Any]) -> None:
        restore_states(restorer, self._base, self.parameters(trained=False), states)


def ensure_same_parameters(reader: ShardReader, named: dict[str, Any], weights: set[str]) -> None:
    """Refuse a checkpoint in which other parameters were trained."""
    if differing := {*named} ^ weights:
        raise reader.mismatch(min(differing))


def fill_weights(reader: ShardReader, named: dict[str, Any], exact: bool = True) -> None:
    """Read whole parameters, or under FSDP2 this rank's rows."""
    for name, parameter in named.items():
        reader.fill(f"{WEIGHTS}/{name}", shard_of(parameter), exact)
