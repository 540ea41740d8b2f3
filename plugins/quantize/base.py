"""The quantized base: how it is requested, described and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear, Module
from transformers import BitsAndBytesConfig

from plugsft import ModelLoad, say
from plugsft.kit import num_weights

from .int8 import METHOD, Int8Config, Int8Linear, Unquantized, store

RECORD = "quantization_config.json"
"""The file in the run's `model/` that says how the base of the adapters was quantized."""


def request(load: ModelLoad, kind: str, dtype: str, left_out: list[str]) -> None:
    """Let transformers quantize each weight as it is loaded."""
    if kind == "int8":
        load.kwargs["quantization_config"] = Int8Config(METHOD, dtype, left_out)
        return
    make: Any = BitsAndBytesConfig  # untyped upstream
    load.kwargs["quantization_config"] = make(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
        llm_int8_skip_modules=left_out or None,
    )


def prepare_int8(model: Any, dtype: str) -> list[Any]:
    """Keep DDP from copying the scales, which are the same on all ranks; return the layers."""
    for module in model.modules():
        # `plugsft plan` has no data: its layers only get the size of their quantized weights.
        if isinstance(module, Unquantized) and module.weight.is_meta:
            codes = torch.empty_like(module.weight, dtype=torch.int8)
            store(module, codes, torch.empty_like(codes[:, :1], dtype=getattr(torch, dtype)))
    layers = {name: it for name, it in model.named_modules() if isinstance(it, Int8Linear)}
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model._ddp_params_and_buffers_to_ignore = [*ignored, *(f"{name}.scale" for name in layers)]
    return [*layers.values()]


def record_when_saved(model: Any) -> None:
    """Write how the base was quantized into each folder of adapters."""
    save, config = model.save_pretrained, model.config.quantization_config

    def save_with_record(folder: Any, *arguments: Any, **options: Any) -> None:
        save(folder, *arguments, **options)
        text = json.dumps(config.to_dict(), indent=1, sort_keys=True)
        Path(folder, RECORD).write_text(text + "\n", encoding="utf8")

    model.save_pretrained = save_with_record


def describe(model: Module, layers: list[Any], kind: str, dtype: str) -> str:
    """Describe what was quantized, and the size of the base before and after."""
    width = getattr(torch, dtype).itemsize
    total = sum(is_base_layer(name, module) for name, module in model.named_modules())
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    stored = sum(map(stored_bytes, frozen))
    stored += sum(layer.scale.nbytes for layer in layers if isinstance(layer, Int8Linear))
    whole = width * sum(map(num_weights, frozen))
    experts = width * sum(weight.numel() for weight in frozen if weight.dim() > 2)
    text = (
        f"{len(layers)} of {total} linear layers in {kind.upper()}: the base takes "
        f"{size(stored)} in place of {size(whole)}"
    )
    if experts:
        unchanged = f"experts ({experts / whole:.0%} of the weights) stay in {dtype}"
        say(f"warning: [plugins.quantize] {unchanged}: they are not linear layers")
        text += f"; {unchanged}"
    return text


def is_base_layer(name: str, module: Module) -> bool:
    """Tell whether a module is a linear layer of the base, not of an adapter."""
    return isinstance(module, Linear) and ".lora_" not in name and not [*module.children()]


def size(count: int) -> str:
    """Write bytes in GiB, or in MiB if they are few."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def stored_bytes(weight: Any) -> int:
    """Return the bytes of a tensor with its scales."""
    quantized = getattr(weight, "quant_state", None)
    if quantized is None or weight.is_meta:
        return int(weight.nbytes)
    inner = quantized.state2
    scales = (quantized.absmax, quantized.code, quantized.offset, inner.absmax, inner.code)
    return int(weight.nbytes + sum(scale.nbytes for scale in scales))
