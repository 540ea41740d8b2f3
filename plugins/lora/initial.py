"""Adapters that start from a part of the base's weights: PiSSA and OLoRA.

The base stays as it is. A frozen copy of the initial adapter is subtracted from the adapter, so the
first loss is the base model's whatever the type of its weights. What is saved is the difference: a
plain adapter of twice the rank, for the unchanged base.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight, gather_params_ctx
from torch import Tensor
from torch.nn import Module

from plugsft import PluginError, RecipeError

from .layers import NAME, SUBTRACTED, FastLinear

ITERATIONS = 16
"""Power iterations of the singular value decomposition, as peft recommends."""

MORE = 32
"""Singular values that are computed and not used, which makes the used ones exact."""


@torch.no_grad()
def start_from_base(model: Module, method: str) -> None:
    """Initialize adapters from the weights of the base, and freeze a copy of them."""
    split = {"pissa": principal_part, "olora": orthogonal_part}[method]
    for name, layer in adapted_layers(model):
        if not isinstance(layer, FastLinear):
            raise RecipeError(
                f'plugins.lora.init: "{method}" is for linear layers, and {name} is a '
                f"{type(layer.get_base_layer()).__name__}; remove it from targets"
            )
        base: Any = layer.get_base_layer()
        with gather_params_ctx([base.weight], modifier_rank=None):
            if not base.weight.is_meta:
                # On the CPU: a GPU computes other numbers.
                weight = dequantize_module_weight(base).detach().to("cpu", torch.float32)
                weight = weight.T if layer.is_target_conv_1d_layer else weight
                halves = split(weight, layer.r[NAME], layer.scaling[NAME])
                for module, values in zip(layer.halves(), halves, strict=True):
                    module.weight.copy_(values)
        layer.freeze_initial(SUBTRACTED)


def principal_part(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return A and B for which scale * B A has the largest singular values (PiSSA)."""
    size = min(rank + MORE, *weight.shape)
    left, values, right = torch.svd_lowrank(weight, size, ITERATIONS)
    roots = (values[:rank] / scale).sqrt()
    return roots[:, None] * right.T[:rank], left[:, :rank] * roots


def orthogonal_part(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the first rows and columns of the QR decomposition (OLoRA)."""
    columns = torch.linalg.qr(weight[:, :rank])[0]
    return columns.T @ weight, columns


def adapted_layers(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with adapters, by name."""
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer))


def initial_state(model: Module) -> dict[str, Tensor]:
    """Return the frozen copies of initial adapters, by name."""
    return {
        f"{name}.{half}": getattr(layer, half)
        for name, layer in adapted_layers(model)
        if getattr(layer, "initial", None)
        for half in ("initial_A", "initial_B")
    }


def scales(model: Module) -> dict[str, float]:
    """Return the factors of the outputs of adapters, which their files do not show."""
    return {name: float(layer.scaling[NAME]) for name, layer in adapted_layers(model)}


@torch.no_grad()
def load_initial_state(model: Module, state: Mapping[str, Any]) -> None:
    """Restore the frozen copies of initial adapters from a checkpoint."""
    copies = initial_state(model)
    if {*copies} != {*state["initial"]} or scales(model) != state["scales"]:
        raise PluginError(
            "plugins.lora: the checkpoint has adapters with other settings (alpha, init or "
            "reference); the folder in plugins.lora.adapter may have changed since; start again in "
            "another output folder"
        )
    for name, values in state["initial"].items():
        copies[name].copy_(values)


def differences(model: Module, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Return the weights of adapters in files: trained less initial ones; edits their config."""
    subtracted = dict(subtracted_layers(model))
    if not subtracted:
        return weights
    doubled = dict(weights)
    for name, layer in subtracted.items():
        first, second = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
        initial_A, initial_B = (half.to("cpu", torch.float32) for half in layer.initial_halves())
        # The scale of the file is alpha / r.
        factor = math.sqrt(config.r) if config.use_rslora else 1.0
        doubled[first] = torch.cat([weights[first].cpu(), initial_A])
        doubled[second] = torch.cat([weights[second].cpu(), -initial_B], 1) * factor
    config.r, config.lora_alpha = 2 * config.r, 2 * config.lora_alpha
    config.use_rslora, config.init_lora_weights = False, True
    return doubled


def subtracted_layers(model: Module) -> Iterator[tuple[str, FastLinear]]:
    """Yield the layers whose initial adapter is subtracted, by name."""
    for name, layer in model.named_modules():
        if isinstance(layer, FastLinear) and layer.initial == SUBTRACTED:
            yield name, layer
