"""The modules of a model that are not quantized."""

from __future__ import annotations

from difflib import get_close_matches

from torch.nn import Linear, Module
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from plugsft import Recipe, RecipeError
from plugsft.kit import meta_model


def modules_to_leave_out(recipe: Recipe, skip: list[str]) -> list[str]:
    """Return the names of modules that are not quantized: head, tied weights, and `skip`."""
    if (model := meta_model(recipe)) is None:
        return []
    if getattr(model.config, "quantization_config", None) is not None:
        raise RecipeError(
            f"{recipe.model.path} is quantized already; set model.path to the model it was made "
            "from, or remove this plugin"
        )
    linear = linear_layers(model)
    left_out = dict.fromkeys(get_keys_to_not_convert(model))
    if recipe.provides("reward_model"):
        left_out["score"] = None  # its new head, which a reader would quantize
    for ending in skip:
        names = [name for name in linear if f".{name}".endswith(f".{ending}")]
        if not names:
            known = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            near = get_close_matches(ending.rpartition(".")[2], known, n=1)
            hint = f" did you mean '{near[0]}'?" if near else ""
            raise RecipeError(
                f"skip: no linear layer is named '{ending}';{hint} "
                f"linear layers: {', '.join(known)}"
            )
        left_out |= dict.fromkeys(names)
    if not {*linear} - {*left_out}:
        raise RecipeError(
            "no linear layer is left to quantize: this model has "
            f"{len(linear)}, and {len({*linear} & {*left_out})} are its head or in skip"
        )
    return sorted(left_out)


def linear_layers(model: Module) -> list[str]:
    """Return the names of the layers that bitsandbytes can quantize."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, Conv1D) or type(module) is Linear
    ]
