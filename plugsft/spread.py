"""A model over its ranks, by DDP, FSDP2 or ZeRO-3: spread, saved and restored by what each holds.

Nobody asks elsewhere which of them it is: to the loop they are all one model and one optimizer.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.optim import Optimizer

from .models import Load
from .parts import Part, Stored, part_of

MODEL, OPTIMIZER = "model", "optimizer"


def spread(
    accelerator: Accelerator, load: Load, model: Module, make: Callable[[Module], Optimizer]
) -> tuple[Module, Optimizer]:
    """Spread a model over the ranks; make its optimizer, of what each then holds."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        engine, zero = accelerator.prepare(model, make(model))
        return engine, zero
    if accelerator.is_fsdp2:
        names = load.names_in(model)
        fsdp2_prepare_model(accelerator, model)
        if names:
            _fetch(model, accelerator.device, names, load)
        return model, make(model)
    model = accelerator.prepare_model(model)
    return model, make(accelerator.unwrap_model(model))


def _fetch(model: Any, device: torch.device, names: dict[str, str], load: Load) -> None:
    """Give a model that has no weights yet its own rows of each, from the files."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
    model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad(), load.files() as rows:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in kept.items():
            tensors[name].copy_(tensor)
        for name, stored in names.items():
            part = part_of(tensors[name])
            row = tensors[name][:1].numel()
            start, stop = part.start // row, (part.start + part.values.numel()) // row
            part.values.copy_(rows(stored, start, stop).reshape(-1))


def trained(accelerator: Accelerator, model: Module) -> dict[str, Tensor]:
    """Return the parameters that are trained, by their names in the plain model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # After an evaluation the last ones stand whole, and are no part of the optimizer.
            module.reshard()
    plain: Module = accelerator.unwrap_model(model)
    return {name: one for name, one in plain.named_parameters() if one.requires_grad}


def parts(accelerator: Accelerator, model: Module, optimizer: Any) -> dict[str, Part]:
    """Return what this rank holds of all that is trained, and of the optimizer's state."""
    named = trained(accelerator, model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _Zero(accelerator, optimizer).parts(named)
    found = {f"{MODEL}/{name}": part_of(one) for name, one in named.items()}
    for name, one in named.items():
        for key, value in optimizer.state[one].items():
            found[f"{OPTIMIZER}/{name}/{key}"] = part_of(torch.as_tensor(value))
    return found


def restore(accelerator: Accelerator, model: Module, optimizer: Any, stored: Stored) -> None:
    """Bring model and optimizer to where a checkpoint left them."""
    named = trained(accelerator, model)
    keys: dict[str, list[str]] = {name: [] for name in named}
    for there in stored.shapes:
        kind, _, rest = there.partition("/")
        name, _, key = rest.rpartition("/") if kind == OPTIMIZER else (rest, "", "")
        if name not in keys:
            raise stored.strange(there)
        keys[name] += [key] if key else []
    with torch.no_grad():
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            _Zero(accelerator, optimizer).restore(named, keys, stored)
            return
        for name, one in named.items():
            stored.fill(f"{MODEL}/{name}", part_of(one))
        names = {id(one): name for name, one in named.items()}
        ordered = [one for group in optimizer.param_groups for one in group["params"]]
        states = {}
        for number, one in enumerate(ordered):
            name = names[id(one)]
            states[number] = {
                key: _state(stored, f"{OPTIMIZER}/{name}/{key}", one) for key in keys[name]
            }
    optimizer.load_state_dict(
        {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
    )


# A state is a number (how many steps), or has the shape of its parameter.
def _state(stored: Stored, name: str, parameter: Tensor) -> Tensor:
    shape = stored.shapes[name]
    alike = shape == tuple(parameter.shape)
    value = torch.empty_like(parameter, requires_grad=False) if alike else torch.empty(shape)
    stored.fill(name, part_of(value))
    return value


class _Zero:
    """DeepSpeed keeps each tensor as equal stretches, the last one padded, in pieces of its own."""

    def __init__(self, accelerator: Accelerator, optimizer: Any) -> None:
        self._rank = accelerator.process_index
        self._zero = optimizer.optimizer
        self._deepspeed: Any = importlib.import_module("deepspeed")
        self._access = self._deepspeed.utils

    def parts(self, named: dict[str, Any]) -> dict[str, Part]:
        found = {}
        for name, one in named.items():
            found[f"{MODEL}/{name}"] = self._mine(one, self._access.safe_get_local_fp32_param(one))
            for key, value in self._states()[0].items():
                if value.dim():
                    value = self._access.safe_get_local_optimizer_state(one, key)
                    found[f"{OPTIMIZER}/{name}/{key}"] = self._mine(one, value)
                else:
                    found[f"{OPTIMIZER}/{name}/{key}"] = part_of(value)
        return found

    def restore(self, named: dict[str, Any], keys: dict[str, list[str]], stored: Stored) -> None:
        first = next(iter(named))
        for flat in self._zero.fp32_partitioned_groups_flat:
            self._zero.optimizer.state[flat] = {
                key: _state(stored, f"{OPTIMIZER}/{first}/{key}", flat)
                if not stored.shapes[f"{OPTIMIZER}/{first}/{key}"]
                else torch.zeros_like(flat)
                for key in keys[first]
            }
        for name, one in named.items():
            held = one.ds_tensor.new_zeros(one.ds_tensor.ds_numel, dtype=torch.float32)
            stored.fill(f"{MODEL}/{name}", self._mine(one, held))
            self._access.safe_set_local_fp32_param(one, held)
            for key in keys[name]:
                if stored.shapes[f"{OPTIMIZER}/{name}/{key}"]:
                    stored.fill(f"{OPTIMIZER}/{name}/{key}", self._mine(one, held))
                    self._access.safe_set_local_optimizer_state(one, held, key)
            # What the forward reads is another copy, of which some ranks hold all.
            with self._deepspeed.zero.GatheredParameters([one], modifier_rank=0):
                if self._rank == 0:
                    stored.fill(f"{MODEL}/{name}", part_of(one.data))

    def _states(self) -> list[dict[str, Tensor]]:
        return [*self._zero.optimizer.state.values()]

    def _mine(self, parameter: Any, values: Tensor) -> Part:
        start = self._rank * parameter.ds_tensor.ds_numel
        here = max(0, min(values.numel(), parameter.ds_numel - start))
        return Part(values[:here], start, tuple(parameter.ds_shape))
