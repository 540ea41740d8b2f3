"""Shards or copies a model over its ranks, by DDP, FSDP2 or ZeRO-3.

The loop sees a model and an optimizer, whichever of them is used.
"""

import copy
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..base.errors import PluginError
from ..model.load import Load
from ..model.tensor_shards import local_part, part_of
from .agree import agreed


def is_sharded(accelerator: Accelerator) -> bool:
    """Tell whether no rank is to hold the whole model."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def loads_in_bfloat16(accelerator: Accelerator) -> bool:
    """Tell whether weights are loaded in bfloat16, and DeepSpeed adds a float32 copy."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return False
    return bool(accelerator.mixed_precision == "bf16")


def shard_model(
    accelerator: Accelerator, load: Load, model: Module, make: Callable[[Module], Optimizer]
) -> tuple[Module, Optimizer]:
    """Shard or copy a model over the ranks; make the optimizer of the weights of this one."""
    names = load.names_in(model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _hand_out(model, accelerator, names, load)
        engine, zero = accelerator.prepare(model, _checked(model, make(model)))
        if loads_in_bfloat16(accelerator):
            _fill_float32(model, names, load)
        return engine, zero
    if accelerator.is_fsdp2:
        fsdp2_prepare_model(accelerator, model)
        if names:
            _fetch(model, accelerator, names, load)
        return model, _checked(model, make(model))
    model = accelerator.prepare_model(model)
    plain = accelerator.unwrap_model(model)
    return model, _checked(plain, make(plain))


def _checked(model: Module, optimizer: Optimizer) -> Optimizer:
    """Refuse an optimizer that does not update exactly the trainable weights."""
    updated = [one for group in optimizer.param_groups for one in group["params"]]
    trained = {one: name for name, one in model.named_parameters() if one.requires_grad}
    known = {*updated}
    if left := [name for one, name in trained.items() if one not in known]:
        raise PluginError(
            f"the plugin that makes the optimizer leaves out {len(left)} trainable weights "
            f"({left[0]} first); give them to a parameter group, or freeze them in optimize_model "
            "(requires_grad_(False))"
        )
    if foreign := [one for one in updated if one not in trained]:
        raise PluginError(
            f"the plugin that makes the optimizer gives it {len(foreign)} tensors that are not "
            f"trainable weights of the model (the first of shape {list(foreign[0].shape)}), so "
            "checkpoints would not save them; remove them from its parameter groups"
        )
    return optimizer


def shard_frozen_model(accelerator: Accelerator, load: Load, model: Any) -> Module:
    """Spread a model that is never trained, as the one that is."""
    names = load.names_in(model)
    model.requires_grad_(False).eval()
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _hand_out(model, accelerator, names, load)
        deepspeed: Any = importlib.import_module("deepspeed")
        config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
        engine: Module = deepspeed.initialize(model=model, config=config)[0]
        return engine
    if accelerator.is_fsdp2:
        fsdp2_prepare_model(accelerator, model)
        if names:
            _fetch(model, accelerator, names, load)
        return model  # type: ignore[no-any-return]
    return accelerator.prepare_model(model, evaluation_mode=True)  # type: ignore[no-any-return]


def _fetch(model: Any, accelerator: Accelerator, names: dict[str, str], load: Load) -> None:
    """Read this rank's rows of each weight from the files."""
    present = {name: one.detach() for name, one in _tensors(model).items() if not one.is_meta}
    model.to_empty(device=accelerator.device)
    model.tie_weights()
    tensors = _tensors(model)
    with torch.no_grad(), load.weights() as weights:
        for name, tensor in present.items():
            tensors[name].copy_(tensor)
        for name, stored in names.items():
            part = part_of(tensors[name])
            row = tensors[name][:1].numel()
            start, stop = part.start // row, (part.start + part.values.numel()) // row
            part.values.copy_(weights.rows(stored, start, stop).reshape(-1))
    parts = {stored: part_of(tensors[name]) for name, stored in names.items()}
    with agreed(accelerator, "comparing the model with its files"):
        load.ensure_same(parts, accelerator.process_index)


def _hand_out(model: Module, accelerator: Accelerator, names: dict[str, str], load: Load) -> None:
    """Read each tensor on one rank, and let DeepSpeed scatter it."""
    if not names:
        return
    deepspeed: Any = importlib.import_module("deepspeed")
    tensors = dict(model.named_parameters())
    with torch.no_grad(), load.weights() as weights:
        for name, stored in names.items():
            one: Any = tensors[name]
            with deepspeed.zero.GatheredParameters([one], modifier_rank=0):
                if accelerator.is_main_process:
                    one.copy_(weights.rows(stored, 0, one.ds_shape[0]))
    parts = {stored: local_part(tensors[name]) for name, stored in names.items()}
    with agreed(accelerator, "comparing the model with its files"):
        load.ensure_same(parts, accelerator.process_index)


def _fill_float32(model: Module, names: dict[str, str], load: Load) -> None:
    """Copy float32 files into DeepSpeed's float32 weights, made from rounded ones."""
    access: Any = importlib.import_module("deepspeed").utils
    tensors: dict[str, Any] = {
        name: one for name, one in model.named_parameters() if name in names and one.requires_grad
    }
    if not tensors:
        return
    with torch.no_grad(), load.weights() as weights:
        for name, one in tensors.items():
            part, row = local_part(one), math.prod(one.ds_shape[1:])
            if not part.values.numel():
                continue
            first, stop = part.start // row, part.start + part.values.numel()
            rows = weights.rows(names[name], first, -(-stop // row))
            if rows.dtype == torch.float32:
                values = torch.zeros_like(one.ds_tensor, dtype=torch.float32)
                mine = rows.reshape(-1)[part.start - first * row : stop - first * row]
                values.view(-1)[: len(mine)].copy_(mine)
                access.safe_set_local_fp32_param(one, values)


def _tensors(model: Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
