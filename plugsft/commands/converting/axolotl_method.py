"""axolotl's methods: adapters, and runs on preferences."""

from . import lora_settings
from .conversion import Conversion

VISION = "plugsft trains on texts, not on images or sounds; use axolotl for this run"
ONLINE = (
    "plugsft trains on rows, and generates none while it trains (GRPO, GDPO, EBFT); use axolotl "
    "for this run"
)
PREFERENCES = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
"""Value of `rl` -> the loss of [plugins.dpo]."""


def lora(c: Conversion) -> None:
    """Write adapters and quantization."""
    adapter = c.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise c.refuse("adapter", "plugsft trains LoRA alone; use [plugins.lora]")
    if adapter:
        _adapters(c)
    bits = 4 if c.on("load_in_4bit") or adapter == "qlora" else 8 if c.on("load_in_8bit") else 0
    if bits and (adapter or c.on("load_in_4bit") or c.on("load_in_8bit")):
        key = "adapter" if bits == 4 and not c.on("load_in_4bit") else f"load_in_{bits}bit"
        lora_settings.set_quantization(c, bits, adapter is not None, key)


def _adapters(c: Conversion) -> None:
    lora_settings.set_lora(c, r=8, alpha=8, dropout=0.0)
    if c.on("lora_target_linear"):
        c.set("plugins.lora.targets", "all-linear", "lora_target_linear")
    elif c.get("lora_target_modules"):
        lora_settings.set_targets(c, c.get("lora_target_modules"), "lora_target_modules")
    lora_settings.set_variants(c, "peft_use_rslora", "peft_use_dora")
    lora_settings.set_loraplus(c)
    lora_settings.set_adapter(c, "lora_model_dir")


def objective(c: Conversion) -> None:
    """Write the plugin of a preference run, or refuse the run."""
    kind = c.get("rl")
    if c.get("processor_type"):
        raise c.refuse("processor_type", VISION)
    if c.on("process_reward_model"):
        raise c.refuse("process_reward_model", "plugsft scores whole answers; use axolotl")
    if c.on("reward_model"):
        center = float(c.number("center_rewards_coefficient", 0.0))
        c.plugin("reward", "center_rewards_coefficient", center=center)
    if kind is None:
        return
    beta = c.first("rl_beta", "dpo_beta", "orpo_alpha", "trl.beta")
    if kind == "kto":
        c.plugin("kto", beta, beta=float(c.number(beta, 0.1)))
        for name in ("desirable_weight", "undesirable_weight"):
            c.set(f"plugins.kto.{name}", float(c.number(f"kto_{name}", 1.0)), f"kto_{name}")
    elif kind in PREFERENCES:
        c.plugin("dpo", "rl", loss=PREFERENCES[kind])
        c.set("plugins.dpo.beta", float(c.number(beta, 0.1)), beta)
        if c.on("precompute_ref_log_probs"):
            c.plugin("dpo_reference", "precompute_ref_log_probs")
    else:
        raise c.refuse("rl", ONLINE)
