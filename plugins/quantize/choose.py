"""The modules of a model that are not quantized."""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import torch
from torch.nn import Linear, Module
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from plugsft import Recipe, RecipeError


def modules_to_leave_out(recipe: Recipe, skip: list[str]) -> list[str]:
    """Return the names of modules that are not quantized: head, tied weights, and `skip`."""
    if (model := meta_model(recipe)) is None:
        return []
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


def meta_model(recipe: Recipe) -> Any:
    """Return the recipe's model without weights, for its names; None if it cannot be built."""
    model = recipe.model
    if model.scratch:
        config: Any = LlamaConfig(num_hidden_layers=model.scratch.layers, tie_word_embeddings=True)
    else:
        options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
        revision = {"revision": model.revision} if model.revision else {}
        try:
            config = AutoConfig.from_pretrained(str(model.path), **options, **revision)
        except Exception:  # the core reports a model that cannot be built
            return None
    if getattr(config, "quantization_config", None) is not None:
        raise RecipeError(
            f"{model.path} is quantized already; set model.path to the model it was made from, or "
            "remove this plugin"
        )
    with suppress(Exception), torch.device("meta"):
        auto_class: Any = AutoModelForCausalLM
        empty = auto_class.from_config(config, trust_remote_code=model.trust_remote_code)
        empty.tie_weights()
        return empty
    return None
