"""The number types of a run, which follow from the recipe.

With `model.dtype = "bfloat16"` or "float16", weights are stored in float32 and computed with in
that type: by autocast in one process and under DDP, by FSDP2's and DeepSpeed's own copies of the
weights. Gradients are summed over micro-batches and ranks in float32.
"""

import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW

from ..base.errors import LaunchError
from ..model.tensor_shards import dtype_name
from ..recipe.tables import Model, Recipe
from .launcher import ACCELERATE_TYPES
from .weights import Weights

AUTOCAST = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""accelerate's name -> the type that a run computes in."""


def on_cpu(recipe: Recipe) -> bool:
    """Whether the run is on the CPU; a GPU stays idle only if the recipe says so."""
    if not torch.cuda.is_available() or recipe.device == "cpu":
        return True
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        raise LaunchError(
            "the launcher was told to use the CPU (use_cpu), and a GPU is visible: launch with a "
            'file of recipes/accelerate/ for GPUs, or set device = "cpu" in the recipe'
        )
    return False


def mixed_precision(model: Model, deepspeed: bool) -> str:
    """Choose accelerate's mixed_precision by the recipe; refuse what ZeRO-3 cannot do."""
    if model.dtype == "float16" and deepspeed:
        raise LaunchError(
            'model.dtype = "float16": ZeRO-3 scales the loss by rules of its own, which '
            "checkpoints cannot resume; launch with recipes/accelerate/fsdp2.yaml"
        )
    if model.weights == "bfloat16":
        if deepspeed:
            raise LaunchError(
                'model.weights = "bfloat16": ZeRO-3 stores and updates weights in float32; remove '
                "it, or launch with recipes/accelerate/fsdp2.yaml"
            )
        return "no"  # computes in the type of the weights
    return ACCELERATE_TYPES[model.dtype]


@cache
def autocast_experts() -> Any:
    """Let autocast cast the grouped products of experts, which torch leaves in float32.

    Returns what unregisters its kernels when it is freed: the cache keeps it.
    """
    make: Any = torch.library.Library  # untyped upstream
    library = make("aten", "IMPL")

    def grouped(left: Tensor, right: Tensor, *others: Any, **more: Any) -> Tensor:
        kind = left.device.type
        dtype = torch.get_autocast_dtype(kind)
        with _ExcludeDispatchKeyGuard(DispatchKeySet(AUTOCAST[kind])):
            product: Tensor = torch._grouped_mm(left.to(dtype), right.to(dtype), *others, **more)
        return product

    for key in AUTOCAST.values():
        library.impl("_grouped_mm", grouped, key.name)
    return library


def reduce_in_float32(accelerator: Accelerator) -> None:
    """Accumulate and reduce gradients in float32 where a run computes in half precision."""
    half = half_dtype(accelerator)
    if half is None:
        return
    autocast_experts()
    if half == torch.float16:
        accelerator.native_amp, accelerator.scaler = True, None  # the loop scales, on CPUs too
    if accelerator.is_fsdp2:
        state: Any = accelerator.state
        state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=half, reduce_dtype=torch.float32
        )


def half_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """The type that a run computes in, if it is narrower than its weights."""
    return HALF.get(accelerator.mixed_precision)


def precision_as_computed(accelerator: Accelerator, held: Weights) -> str:
    """Name the type that the model computes in, as loaded: it is the same on all ranks."""
    if half := half_dtype(accelerator):
        return dtype_name(half)
    return _trained_types(held)


def dtypes_of(accelerator: Accelerator, held: Weights, optimizer: Any) -> dict[str, str]:
    """Read the number types from the loaded model: the record says what is, not what was asked."""
    weights = _trained_types(held)
    types = {
        "weights": weights,
        "compute": precision_as_computed(accelerator, held),
        "gradients": "float32" if half_dtype(accelerator) else weights,  # reduce_in_float32
    }
    parameters = held.parameters(trained_only=False).values()
    if frozen := _names(each for each in parameters if not each.requires_grad):
        types["frozen"] = frozen
    while hasattr(optimizer, "optimizer"):  # accelerate and DeepSpeed have wrapped it
        optimizer = optimizer.optimizer
    if type(optimizer) is AdamW:  # a plugin's optimizer may store other types
        types["optimizer"] = weights
    return types


def _trained_types(held: Weights) -> str:
    # Under ZeRO-3, the trained numbers are float32 beside the parameters that compute.
    return _names(held.local(each) for each in held.parameters().values())


def _names(parameters: Iterable[Tensor]) -> str:
    return " and ".join(sorted({dtype_name(each.dtype) for each in parameters}))


def describe_dtypes(dtypes: dict[str, str], device: torch.device) -> str:
    """Describe the types of `dtypes_of` and the device in one line."""
    weights, name = dtypes["weights"], device.type
    if name == "cuda":
        name = torch.cuda.get_device_name(device)
    frozen = f"frozen weights {dtypes['frozen']}, trained ones" if "frozen" in dtypes else "weights"
    states = f"optimizer states {dtypes['optimizer']}, " if "optimizer" in dtypes else ""
    return (
        f"{frozen} {weights}, computed in {dtypes['compute']}, gradients summed in "
        f"{dtypes['gradients']}, {states}on {name}"
    )
