"""TRL's trainers, and their objectives."""

from ...base.errors import RecipeError
from .conversion import Conversion

RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4}
"""Trainer -> TRL's default learning rate."""
LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "sigmoid_norm": "length_normalized"}
OF_KTO = ("kto", "apo_zero_unpaired")
MARKS = {
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "dpo": ("beta", "loss_type", "precompute_ref_log_probs", "max_prompt_length", "ld_alpha"),
}
"""Trainer -> the keys that only it has, or `trl dpo` at last."""
ONLINE = ("num_generations", "reward_funcs", "max_completion_length", "use_vllm")
"""Keys of trainers that generate while they train."""


def choose_trainer(c: Conversion, named: str) -> None:
    """Choose the trainer: the one named, or that of its keys."""
    online = next((key for key in ONLINE if c.get(key) is not None), "")
    if online or named in ("grpo", "rloo", "distillation"):
        key = online or "the command"
        raise RecipeError(
            f"{c.path}: {key}: plugsft trains on rows, and generates none while it trains (PPO, "
            "GRPO, RLOO, distillation); use TRL for this run"
        )
    marked = (name for name, keys in MARKS.items() if any(c.get(key) is not None for key in keys))
    c.trainer = named or next(marked, "sft")
    if c.get("loss_type") in OF_KTO and not named:
        c.trainer = "kto"
    if not named:
        c.remarks.append(f"read as a configuration of `trl {c.trainer}`; --trainer names another")


def objective(c: Conversion) -> None:
    """Write the plugin of a preference run."""
    if c.trainer == "dpo":
        _dpo(c)
    elif c.trainer == "kto":
        loss = str(c.get("loss_type", "kto"))
        if loss not in OF_KTO:
            raise c.refuse("loss_type", "plugsft has no such loss; use kto or apo_zero_unpaired")
        c.plugin("kto", "loss_type", loss=loss)
        for key, default in (("beta", 0.1), ("desirable_weight", 1.0), ("undesirable_weight", 1.0)):
            c.set(f"plugins.kto.{key}", float(c.number(key, default)), key)
    elif c.trainer == "reward":
        center = float(c.number("center_rewards_coefficient", 0.0))
        c.plugin("reward", "center_rewards_coefficient", center=center)
    elif c.get("loss_type", "nll") not in ("nll", "chunked_nll"):
        c.leave("loss_type", "trained with the usual loss; write a plugin that implements `step`")


def _dpo(c: Conversion) -> None:
    losses = c.get("loss_type", "sigmoid")
    names = [losses] if isinstance(losses, str) else list(losses)
    if len(names) == 2 and "sft" in names and not c.get("loss_weights"):
        names.remove("sft")
        c.set("plugins.dpo.nll", 1.0, "loss_type")
    if len(names) != 1 or names[0] not in LOSSES:
        raise c.refuse(
            "loss_type",
            f"plugsft has no such loss; use {', '.join(LOSSES)}, or those of docs/preferences.md",
        )
    c.plugin("dpo", "loss_type", loss=LOSSES[names[0]])
    c.set("plugins.dpo.beta", float(c.number("beta", 0.1)), "beta")
    if c.number("label_smoothing", 0) and names[0] in ("sigmoid_norm", "sigmoid"):
        c.leave("label_smoothing", "TRL uses it with other losses; set plugins.dpo.label_smoothing")
    if c.on("precompute_ref_log_probs"):
        c.plugin("dpo_reference", "precompute_ref_log_probs")
