"""A base whose weights are rounded as `quantize` does it: by transformers, or by a loop."""

import torch
from torch.nn import Linear
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def restored(folder, dtype=torch.float32, skip=None, kind="nf4"):
    """Return the base with rounded weights, by transformers alone or by a loop."""
    if kind == "int8":
        return rounded_to_int8(folder, dtype, skip or [])
    config = BitsAndBytesConfig(
        **NF4, bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=skip and ["lm_head", *skip]
    )
    load = AutoModelForCausalLM.from_pretrained
    rounded = load(folder, quantization_config=config, dtype=dtype).dequantize(dtype=dtype)
    plain = load(folder, dtype=dtype)
    for module, other in zip(plain.modules(), rounded.modules(), strict=True):
        # transformers turns GPT-2's Conv1D into linear layers.
        turned = type(module) is not type(other)
        for name, weight in module.named_parameters(recurse=False):
            values = getattr(other, name).detach()
            weight.data.copy_(values.T if turned and name == "weight" else values)
    return plain


def rounded_to_int8(folder, dtype, skip):
    """Return the base with each output's weights rounded to 255 equidistant values."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for name, module in plain.named_modules():
        if isinstance(module, Linear | Conv1D) and not name.endswith(("lm_head", *skip)):
            weight = module.weight.data.T if isinstance(module, Conv1D) else module.weight.data
            for row in weight:
                scale = (row.float().abs().max() / 127).to(dtype)
                row.copy_((row.float() / scale.float()).round().clamp(-127, 127) * scale.float())
    return plain
