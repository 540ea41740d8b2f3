"""Options of DPO that have no effect, or that contradict the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plugsft import Recipe, RecipeError

if TYPE_CHECKING:
    from . import Dpo


def ensure_options_work(plugin: Dpo, recipe: Recipe) -> None:
    """Refuse options that would have no effect."""
    if plugin.label_smoothing and plugin.loss not in ("sigmoid", "length_normalized"):
        raise RecipeError(f'label_smoothing has no effect with loss = "{plugin.loss}"; remove it')
    _ensure_reference_exists(plugin.reference or "")
    if recipe.data.train_on == "all":
        raise RecipeError(
            'data.train_on = "all" would score prompts, but DPO scores answers only; remove it'
        )
    packing = recipe.plugins.get("bfd_packing", {})
    if packing.get("overlong", "error") != "error":
        raise RecipeError(
            "DPO compares whole answers, so bfd_packing must not cut them; remove its overlong, "
            'and raise its capacity, or lower data.max_length with data.too_long = "truncate"'
        )
    if plugin.share_prompt:
        _ensure_prompts_can_be_shared(recipe)


def _ensure_reference_exists(reference: str) -> None:
    """Refuse a path without a folder; a name on the hub has one slash."""
    is_path = reference and (reference[0] in "./" or reference.count("/") > 1)
    if is_path and not Path(reference).exists():
        raise RecipeError(f"reference: {reference}: no such folder")


def _ensure_prompts_can_be_shared(recipe: Recipe) -> None:
    if not recipe.has("bfd_packing"):
        raise RecipeError("share_prompt is for packed rows; add [plugins.bfd_packing]")
    kernel = recipe.plugins.get("flash_attention", {}).get("kernel")
    if kernel in ("fa2", "fa3"):
        raise RecipeError(
            f"share_prompt: the kernel {kernel} of [plugins.flash_attention] does not support it; "
            'set kernel = "torch" or "sdpa"'
        )
