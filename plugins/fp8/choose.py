"""The linear layers that multiply in float8, and what fp8 is not for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Linear

from plugsft import Machine, Recipe, RecipeError
from plugsft.kit import decoder_layers, meta_model

if TYPE_CHECKING:
    from . import Fp8

MULTIPLE = 16
"""The sizes of a product must be multiples of it on a GPU."""


@dataclass
class Choice:
    """The linear layers of a model: those to convert, and how many others there are, and why."""

    chosen: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)

    def describe(self, plugin: Fp8) -> str:
        """Describe the choice in one line."""
        total = len(self.chosen) + self.others.total()
        kept = ", ".join(f"{count} {why}" for why, count in self.others.items())
        text = f"{len(self.chosen)} of {total} linear layers multiply in float8 ({plugin.scaling}"
        text += ", emulated)" if plugin.emulate else ")"
        return f"{text}; not converted: {kept}" if kept else text


def choose(plugin: Fp8, model: Any) -> Choice:
    """Choose the linear layers to convert; refuse a model that has none."""
    layers = decoder_layers(model, "multiply in float8; remove [plugins.fp8]")
    inner = {*layers[plugin.keep : len(layers) - plugin.keep]}
    ends = {module for layer in layers if layer not in inner for module in layer.modules()}
    converted = {module for layer in inner for module in layer.modules()}
    choice, kept = Choice(), "layer" if plugin.keep == 1 else f"{plugin.keep} layers"
    for name, module in model.named_modules():
        if type(module) is not Linear:
            continue
        sizes = (module.in_features, module.out_features)
        if module in ends:
            choice.others[f"in the first and last {kept}"] += 1
        elif module not in converted:
            choice.others["outside the layers (head)"] += 1
        elif min(sizes) < plugin.min_size:
            choice.others[f"with fewer than {plugin.min_size} inputs or outputs"] += 1
        elif any(size % MULTIPLE for size in sizes):
            choice.others[f"whose size is no multiple of {MULTIPLE}"] += 1
        else:
            choice.chosen.append(name)
    if not choice.chosen:
        raise RecipeError(
            f"plugins.fp8: no layer would multiply in float8: {choice.describe(plugin)}; "
            "lower min_size or keep, or remove [plugins.fp8]"
        )
    return choice


CAPABILITY = (8, 9)
"""The first GPUs that multiply in float8: Ada and Hopper."""


def ensure_usable(plugin: Fp8, recipe: Recipe, machine: Machine) -> None:
    """Refuse a machine without float8, and what it would make wrong or slow."""
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
    if not plugin.emulate:
        ensure_hardware(recipe)
    # The sizes of a model from scratch are known when it is made.
    if not recipe.model.scratch and (model := meta_model(recipe)) is not None:
        choose(plugin, model)


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
