"""What fp8 is not for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plugsft import Machine, Recipe, RecipeError
from plugsft.kit import meta_model

from .choose import choose

if TYPE_CHECKING:
    from . import Fp8

CAPABILITY = (8, 9)
"""The first GPUs that multiply in float8: Ada and Hopper."""


def ensure_usable(plugin: Fp8, recipe: Recipe, machine: Machine) -> None:
    """Refuse a machine without float8, and what cannot be combined with it."""
    ensure_combines(plugin, recipe, machine)
    if not plugin.emulate:
        ensure_hardware(recipe)
    # The sizes of a model from scratch are known when it is made.
    if not recipe.model.scratch and (model := meta_model(recipe)) is not None:
        choose(plugin, model)


def ensure_combines(plugin: Fp8, recipe: Recipe, machine: Machine) -> None:
    """Refuse what float8 would make wrong or slow."""
    if adapters := recipe.provides("adapters"):
        raise RecipeError(
            f"float8 is for full fine-tuning: it would round the frozen weights of "
            f"{adapters.table} again in each product; remove one of the two"
        )
    if reference := recipe.provides("reference_model"):
        raise RecipeError(
            f"the reference of {reference.table} would multiply in {recipe.model.dtype} and the "
            "model in float8, so the rounding would count as learning; remove one of the two"
        )
    packer = recipe.provides("packed_rows")
    if packer and plugin.scaling == "tensorwise":
        raise RecipeError(
            'scaling = "tensorwise" rounds a document by the largest value of its whole packed '
            f'row, so documents are not apart; set scaling = "rowwise", or remove {packer.table}'
        )
    if machine.strategy == "zero3":
        raise RecipeError(
            "torchao's layers keep their whole weights for the backward pass, which ZeRO-3 "
            "shards; launch with recipes/accelerate/fsdp2.yaml, or remove [plugins.fp8]"
        )


def ensure_hardware(recipe: Recipe) -> None:
    """Refuse a machine that does not multiply in float8, and products that are not bfloat16's."""
    cure = "set emulate = true to see what it learns, slowly; or remove [plugins.fp8]"
    if recipe.device != "auto" or not torch.cuda.is_available():
        raise RecipeError(f"float8 needs a GPU, and there is none; {cure}")
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        raise RecipeError(
            f"float8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, and "
            f"{torch.cuda.get_device_name()} has {'.'.join(map(str, capability))}; {cure}"
        )
    if recipe.model.dtype != "bfloat16":
        raise RecipeError(
            f'float8 speeds up products of bfloat16, and model.dtype is "{recipe.model.dtype}"; '
            'set model.dtype = "bfloat16", or remove [plugins.fp8]'
        )
