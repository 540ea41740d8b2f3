"""The number types of a run, from the recipe and the launcher.

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
    """Choose accelerate's mixed_precision by the recipe; refuse what the launcher adds to it."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked not in ("no", "bf16") and (asked, model.dtype) != ("fp16", "float16"):
        raise LaunchError(
            f"the launcher asks for mixed_precision {asked}; set mixed_precision: no in its file, "
            'and model.dtype = "float16" in the recipe'
        )
    if model.dtype == "float16":
        if deepspeed:
            raise LaunchError(
                'model.dtype = "float16": ZeRO-3 scales the loss by rules of its own, which '
                "checkpoints cannot resume; launch with recipes/accelerate/fsdp2.yaml"
            )
        return "fp16"
    if model.weights == "bfloat16":
        if deepspeed:
            raise LaunchError(
                'model.weights = "bfloat16": ZeRO-3 stores and updates weights in float32; remove '
                "it, or launch with recipes/accelerate/fsdp2.yaml"
            )
        return "no"  # computes in the type of the weights
    return "bf16" if model.dtype == "bfloat16" else asked


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


def ensure_same_dtypes(config: dict[str, Any], mixed_precision: str) -> None:
    """Refuse a DeepSpeed file that chooses number types, which follow from the recipe."""
    half = {"enabled": mixed_precision == "bf16"}
    # accelerate adds "bf16" and "fp16" itself, and on AMD's GPUs the last one.
    allowed = {
        "fp16": ({"enabled": "auto"}, {"enabled": False}),
        "bf16": ({"enabled": "auto"}, half),
        "data_types": (),
        "communication_data_type": ("fp32",),
    }
    for name, values in allowed.items():
        if config.get(name) and config[name] not in values:
            raise LaunchError(
                f"the DeepSpeed file sets {name} = {config[name]}, and number types follow from "
                f'the recipe (model.dtype, model.weights): remove "{name}"'
            )


def dtypes_of(accelerator: Accelerator, held: Weights, optimizer: Any) -> dict[str, str]:
    """Read the number types from the loaded model: the record says what is, not what was asked."""
    parameters = held.parameters(trained_only=False).values()
    # Under ZeRO-3, the trained numbers are float32 beside the parameters that compute.
    weights = _names(held.local(each) for each in parameters if each.requires_grad)
    frozen = _names(each for each in parameters if not each.requires_grad)
    half = half_dtype(accelerator)
    types = {"weights": weights, "compute": weights, "gradients": weights}
    if half:
        types |= {"compute": dtype_name(half), "gradients": "float32"}  # reduce_in_float32
    if frozen:
        types["frozen"] = frozen
    while hasattr(optimizer, "optimizer"):  # accelerate and DeepSpeed have wrapped it
        optimizer = optimizer.optimizer
    if type(optimizer) is AdamW:  # a plugin's optimizer may store other types
        types["optimizer"] = weights
    return types


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
