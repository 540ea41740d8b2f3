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


def set_lora(c: Conversion, r: int, alpha: int, dropout: float) -> None:
    """Write rank, alpha and dropout from keys that axolotl and TRL share; defaults differ."""
    c.set("plugins.lora.r", c.whole("lora_r", r), "lora_r")
    c.set("plugins.lora.alpha", c.whole("lora_alpha", alpha), "lora_alpha")
    c.set("plugins.lora.dropout", float(c.number("lora_dropout", dropout)), "lora_dropout")
    if c.get("lora_modules_to_save"):
        names = _names(c.get("lora_modules_to_save"))
        c.set("plugins.lora.modules_to_save", names, "lora_modules_to_save")


def set_targets(c: Conversion, value: Any, key: str) -> None:
    """Write the adapted layers: a list of names, or all linear layers."""
    names = _names(value)
    if names == ["all-linear"]:
        c.set("plugins.lora.targets", "all-linear", key)
    elif any(set(name) & set("\\^$.*+|()[]") for name in names):
        c.leave(key, 'a pattern; use the names\' ends: plugins.lora.targets = ["q_proj", ...]')
    else:
        c.set("plugins.lora.targets", names, key)


def _names(value: Any) -> list[str]:
    """Return the names of a setting; a shell line has one without a list."""
    return [value] if isinstance(value, str) else [str(name) for name in value]


def set_variants(c: Conversion, rslora: str, dora: str) -> None:
    """Write rsLoRA and DoRA."""
    for option, key in (("rslora", rslora), ("dora", dora)):
        if c.on(key):
            c.set(f"plugins.lora.{option}", True, key)


def set_loraplus(c: Conversion) -> None:
    """Write LoRA+."""
    if c.get("loraplus_lr_ratio"):
        ratio = float(c.number("loraplus_lr_ratio", 1))
        c.set("plugins.lora.lr_ratio", ratio, "loraplus_lr_ratio")


def set_adapter(c: Conversion, key: str) -> None:
    """Write the adapters that the run trains further."""
    if c.get(key):
        c.set("plugins.lora.adapter", str(c.get(key)), key)


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
