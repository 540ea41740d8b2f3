"""Capabilities: what a recipe's plugins can do, asked without naming a plugin."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..base.errors import PluginError, choices

SUGGESTED = {
    "adapters": "lora",
    "batches_ahead": "async_collate",
    "bfloat16_updates": "low_memory_adam",
    "cached_tokens": "arrow_cache",
    "compiled_layers": "compile",
    "early_stop": "early_stopping",
    "external_reports": "tracker",
    "fast_attention": "flash_attention",
    "fused_head": "fused_loss",
    "fused_kernels": "liger",
    "labelled_answers": "kto",
    "offloaded_activations": "activation_offload",
    "packed_rows": "bfd_packing",
    "preference_pairs": "dpo",
    "quantized_base": "quantize",
    "recomputed_activations": "gradient_checkpointing",
    "reference_model": "dpo",
    "reward_model": "reward",
    "sampled_answers": "samples",
    "shared_prompts": "dpo",
    "sorted_lengths": "length_group",
    "stored_reference": "dpo_reference",
    "traced_steps": "profiler",
    "weighted_examples": "dpo",
}
"""Capability -> the bundled plugin to suggest for it, in messages only; see docs/hooks.md."""
OPTION_NEEDED = {"packed_rows"}
"""Capabilities that must name the option that tunes them."""
SHARED = {"early_stop", "external_reports", "fused_kernels", "traced_steps"}
"""Capabilities that several active plugins may provide."""


class Capability(NamedTuple):
    """A capability, and the plugin that provides it."""

    plugin: str
    option: str | None
    """The option that tunes it."""
    value: Any
    """The value of that option; None by default."""

    @property
    def table(self) -> str:
        """The plugin's table in the recipe: [plugins.bfd_packing]."""
        return f"[plugins.{self.plugin}]"

    @property
    def key(self) -> str:
        """The option's key in the recipe: plugins.bfd_packing.capacity."""
        return f"plugins.{self.plugin}.{self.option}"

    @staticmethod
    def bundled(name: str) -> "Capability":
        """Return the bundled plugin to suggest for a capability."""
        ensure_known(name)
        return Capability(SUGGESTED[name], None, None)


def ensure_complete(provides: Mapping[str, str | None]) -> None:
    """Refuse capabilities that are unknown, or lack the option that tunes them."""
    for capability, option in provides.items():
        ensure_known(capability)
        if option is None and capability in OPTION_NEEDED:
            raise PluginError(
                f"'{capability}' needs the option that tunes it: "
                f'provides={{"{capability}": "OPTION"}}'
            )


def ensure_known(capability: str) -> None:
    """Refuse an unknown capability, which nobody asks for."""
    if capability not in SUGGESTED:
        hint = choices(capability, SUGGESTED)
        raise PluginError(f"unknown capability '{capability}'{hint}")
