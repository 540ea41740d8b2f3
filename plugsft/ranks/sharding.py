"""Shards or copies a model over its ranks, by DDP, FSDP2 or ZeRO-3.

The loop sees a model and an optimizer, whichever of them is used.
"""

import copy
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..model.load import ModelLoad
from ..model.tensor_shards import shard_of
from .optimizer_checks import (
    ensure_suits_zero3,
    ensure_updates_trained_weights,
    explain_optimizer,
)
from .weights import Weights, ZeroWeights


def is_sharded(accelerator: Accelerator) -> bool:
    """Tell whether each rank stores only its shard of the model."""
    return is_zero3(accelerator) or bool(accelerator.is_fsdp2)


def is_zero3(accelerator: Accelerator) -> bool:
    """Tell whether DeepSpeed shards the model, which scatters each tensor as it is made."""
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def loads_in_bfloat16(accelerator: Accelerator) -> bool:
    """Tell whether weights are loaded in bfloat16, and DeepSpeed adds a float32 copy."""
    return is_zero3(accelerator) and accelerator.mixed_precision == "bf16"


def shard_model(
    accelerator: Accelerator, load: ModelLoad, model: Module, make: Callable[[Module], Optimizer]
) -> tuple[Module, Optimizer]:
    """Shard or copy a model over the ranks; make the optimizer of this rank's weights."""
    if is_zero3(accelerator):
        return _shard_by_zero3(accelerator, load, model, make)
    prepared = model
    if accelerator.is_fsdp2:
        _shard_by_rows(accelerator, load, model)
    else:
        prepared = accelerator.prepare_model(model)
    if isinstance(prepared, DistributedDataParallel):
        _choose_buckets(prepared)
    return prepared, ensure_updates_trained_weights(model, make(model))


def shard_frozen_model(accelerator: Accelerator, load: ModelLoad, model: Any) -> Module:
    """Shard a model that is never trained, like the trained one."""
    model.requires_grad_(False).eval()
    if is_zero3(accelerator):
        _read_weights(accelerator, load, load.names_in_files(model), _tensors(model))
        config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
        deepspeed: Any = importlib.import_module("deepspeed")
        engine: Module = deepspeed.initialize(model=model, config=config)[0]
        return engine
    if accelerator.is_fsdp2:
        _shard_by_rows(accelerator, load, model)
        return model  # type: ignore[no-any-return]
    return accelerator.prepare_model(model, evaluation_mode=True)  # type: ignore[no-any-return]


def weights_of(accelerator: Accelerator, model: Module, optimizer: Any) -> Weights:
    """Return this rank's part of a sharded or copied model."""
    if is_zero3(accelerator):
        return ZeroWeights(accelerator, model, optimizer.optimizer)
    return Weights(accelerator, model)


def _shard_by_zero3(
    accelerator: Accelerator, load: ModelLoad, model: Module, make: Callable[[Module], Optimizer]
) -> tuple[Module, Optimizer]:
    names = load.names_in_files(model)
    _read_weights(accelerator, load, names, _tensors(model))
    with explain_optimizer(accelerator, "the plugin's optimizer"):
        optimizer = make(model)
    engine, zero = accelerator.prepare(model, ensure_updates_trained_weights(model, optimizer))
    if loads_in_bfloat16(accelerator):
        # DeepSpeed makes its float32 weights of rounded ones.
        weights = weights_of(accelerator, engine, zero)
        with torch.no_grad():
            for name, parameter in weights.parameters().items():
                if name in names:
                    weights.fill(parameter, partial(load.files.fill, names[name]))
    ensure_suits_zero3(zero.optimizer.optimizer)
    return engine, zero


def _choose_buckets(model: DistributedDataParallel) -> None:
    """Let DDP choose its buckets before the first step.

    It does so after one backward pass. Buckets decide the order in which gradients are added, so a
    resumed run must use the same ones from its first step on.
    """
    total: Any = sum(weight.sum() for weight in model.parameters() if weight.requires_grad)
    model.reducer.prepare_for_backward([])  # as its forward would
    (total * 0).backward()
    model.zero_grad()


def _shard_by_rows(accelerator: Accelerator, load: ModelLoad, model: Any) -> None:
    """Shard a model by FSDP2; read this rank's rows of the weights that are not loaded yet."""
    names = load.names_in_files(model)
    # accelerate wants to find each of them; a class for text also names layers of eyes.
    present_kinds = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = {*(model._no_split_modules or ())} & present_kinds
    fsdp2_prepare_model(accelerator, model)
    if hasattr(model, "generate"):  # adapters' goes to the model inside, past the forward's hooks
        register_fsdp_forward_method(model, "generate")
    if not names:
        return
    present = {
        name: tensor.detach() for name, tensor in _tensors(model).items() if not tensor.is_meta
    }
    model.to_empty(device=accelerator.device)
    model.tie_weights()
    tensors = _tensors(model)
    with torch.no_grad():
        for name, tensor in present.items():
            tensors[name].copy_(tensor)
    _read_weights(accelerator, load, names, tensors)


def _read_weights(
    accelerator: Accelerator, load: ModelLoad, names: dict[str, str], tensors: dict[str, Any]
) -> None:
    """Read this rank's shard of the weights that are not loaded yet.

    Under ZeRO-3 one rank reads each tensor, and DeepSpeed scatters it: it alone knows its copies.
    """
    with torch.no_grad():
        for name, stored in names.items():
            tensor = tensors[name]
            if not hasattr(tensor, "ds_tensor"):
                load.files.fill(stored, shard_of(tensor))
                continue
            deepspeed: Any = importlib.import_module("deepspeed")
            with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                if accelerator.is_main_process:
                    tensor.copy_(load.files.whole(stored))


def _tensors(model: Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
