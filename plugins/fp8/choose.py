"""The choice of the linear layers that multiply in float8."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.nn import Linear

from plugsft import RecipeError
from plugsft.kit import decoder_layers

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
