"""The modules of a model that are not quantized."""

from __future__ import annotations

from torch.nn import Linear
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from plugsft import Recipe, RecipeError
from plugsft.kit import find_modules, meta_model


def modules_to_leave_out(recipe: Recipe, skip: list[str]) -> list[str]:
    """Return the names of modules that are not quantized: head, tied weights, and `skip`."""
    if (model := meta_model(recipe)) is None:
        return []
    if getattr(model.config, "quantization_config", None) is not None:
        raise RecipeError(
            f"{recipe.model.path} is quantized already; set model.path to the model it was made "
            "from, or remove this plugin"
        )
    # bitsandbytes can quantize these.
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Conv1D) or type(module) is Linear
    ]
    left_out = dict.fromkeys(get_keys_to_not_convert(model))
    if recipe.provides("reward_model"):
        left_out["score"] = None  # its new head, which a reader would quantize
    left_out |= dict.fromkeys(find_modules("skip: no linear layer", skip, linear, linear))
    if not {*linear} - {*left_out}:
        raise RecipeError(
            "no linear layer is left to quantize: this model has "
            f"{len(linear)}, and {len({*linear} & {*left_out})} are its head or in skip"
        )
    return sorted(left_out)
