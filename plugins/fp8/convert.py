"""The conversion of linear layers to torchao's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch._inductor import config as inductor
from torch.nn import Linear, Module
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from .choose import choose

if TYPE_CHECKING:
    from . import Fp8


def convert_layers(plugin: Fp8, model: Any) -> str:
    """Convert linear layers in place; return what was converted, and what was not."""
    choice = choose(plugin, model)
    if plugin.scaling == "rowwise":
        # As torchtitan: compiled layers that skip casts may end in NaN (pytorch issue 150859).
        inductor.emulate_precision_casts = True
    for name in choice.chosen:
        layer = float8_layer(model.get_submodule(name), plugin.scaling, plugin.emulate)
        model.set_submodule(name, layer)
    return choice.describe(plugin)


def float8_layer(layer: Linear, scaling: str, emulate: bool) -> Module:
    """Return torchao's layer with the same parameters.

    Rows have any number of tokens, so products are padded.
    """
    config = Float8LinearConfig.from_recipe_name(scaling)
    config = replace(config, emulate=emulate, pad_inner_dim=True)
    converted: Module = Float8Linear.from_float(layer, config)
    return converted.train(layer.training)
