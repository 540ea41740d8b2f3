"""Options of DPO that have no effect, or that contradict the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plugsft import Capability, Recipe, RecipeError

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
    if plugin.share_prompt and not recipe.provides("packed_rows"):
        packing = Capability.bundled("packed_rows").table
        raise RecipeError(f"share_prompt is for packed rows; add {packing}")


def _ensure_reference_exists(reference: str) -> None:
    """Refuse a path without a folder; a name on the hub has one slash."""
    is_path = reference and (reference[0] in "./" or reference.count("/") > 1)
    if is_path and not Path(reference).exists():
        raise RecipeError(f"reference: {reference}: no such folder")
