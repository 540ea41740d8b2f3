"""The choice of the linear layers that multiply in float8."""

from __future__ import annotations

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
    at_the_ends: int = 0
    odd: int = 0
    small: int = 0
    outside: int = 0

    def describe(self, plugin: Fp8) -> str:
        """Describe the choice in one line."""
        layers = "layer" if plugin.keep == 1 else f"{plugin.keep} layers"
        others = {
            f"in the first and last {layers}": self.at_the_ends,
            f"with fewer than {plugin.min_size} inputs or outputs": self.small,
            f"whose size is no multiple of {MULTIPLE}": self.odd,
            "outside the layers (head)": self.outside,
        }
        total = len(self.chosen) + sum(others.values())
        kept = ", ".join(f"{count} {where}" for where, count in others.items() if count)
        text = f"{len(self.chosen)} of {total} linear layers multiply in float8 ({plugin.scaling}"
        text += ", emulated)" if plugin.emulate else ")"
        return f"{text}; not converted: {kept}" if kept else text


def choose(plugin: Fp8, model: Any) -> Choice:
    """Choose the linear layers to convert; refuse a model that has none."""
    layers = decoder_layers(model, "multiply in float8; remove [plugins.fp8]")
    inner = {*layers[plugin.keep : len(layers) - plugin.keep]}
    ends = {module for layer in layers if layer not in inner for module in layer.modules()}
    converted = {module for layer in inner for module in layer.modules()}
    choice = Choice()
    for name, module in model.named_modules():
        if type(module) is not Linear:
            continue
        sizes = (module.in_features, module.out_features)
        if module in ends:
            choice.at_the_ends += 1
        elif module not in converted:
            choice.outside += 1
        elif min(sizes) < plugin.min_size:
            choice.small += 1
        elif any(size % MULTIPLE for size in sizes):
            choice.odd += 1
        else:
            choice.chosen.append(name)
    if not choice.chosen:
        raise RecipeError(
            f"plugins.fp8: no layer would multiply in float8: {choice.describe(plugin)}; "
            "lower min_size or keep, or remove [plugins.fp8]"
        )
    return choice
