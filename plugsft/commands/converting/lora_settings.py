"""LoRA and quantization, for the tables of all tools."""

import json
from pathlib import Path
from typing import Any

from .conversion import Conversion

OF_PEFT = {
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "gpt_neox": ("query_key_value",),
    "falcon": ("query_key_value",),
}
"""model_type -> the modules that peft adapts by default, where not q_proj and v_proj."""


def set_lora(c: Conversion, options: dict[str, Any], keys: dict[str, str]) -> None:
    """Write [plugins.lora]; `keys` has the setting of each option."""
    for option, value in options.items():
        c.set(f"plugins.lora.{option}", value, keys.get(option, option))


def read_targets(c: Conversion, value: Any, key: str) -> Any:
    """Return the targets that a setting names: a list of names, or all linear layers."""
    names = [value] if isinstance(value, str) else list(value)
    if names == ["all-linear"]:
        return "all-linear"
    if any(set(name) & set("\\^$.*+|()[]") for name in map(str, names)):
        c.leave(key, 'a pattern; use the names\' ends: plugins.lora.targets = ["q_proj", ...]')
        return None
    return [str(name) for name in names]


def peft_default(c: Conversion, model: str) -> list[str] | None:
    """Return what peft adapts by default, if the model lies here and is of a rare family."""
    try:
        kind = json.loads((Path(model) / "config.json").read_text("utf8"))["model_type"]
    except (OSError, ValueError, KeyError):
        return None
    return [*OF_PEFT.get(kind, ())] or None


def set_quantization(c: Conversion, bits: int, adapters: bool, key: str) -> None:
    """Write [plugins.quantize]."""
    if not adapters:
        raise c.refuse(key, "quantized weights cannot be trained; use adapters (LoRA) on them")
    if bits == 4:
        comment = "plugsft quantizes the scales, too (double quantization)"
        c.plugin("quantize", key, kind="nf4", comment=comment)
    elif bits == 8:
        comment = "a scale for each output; no outliers apart"
        c.plugin("quantize", key, kind="int8", comment=comment)
    else:
        c.leave(key, "plugsft quantizes to 4 or 8 bits; use [plugins.quantize]")


def rank(c: Conversion, key: str, default: int) -> int:
    """Return a whole number of a setting."""
    return c.whole(key, default)
