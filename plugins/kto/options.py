"""Options that have no effect, or that contradict the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plugsft import Recipe, RecipeError

if TYPE_CHECKING:
    from . import Kto


def ensure_options_work(plugin: Kto, recipe: Recipe) -> None:
    """Refuse options that would have no effect."""
    if recipe.data.train_on == "all":
        raise RecipeError(
            'data.train_on = "all" would score prompts, but KTO scores answers only; remove it'
        )
    if plugin.loss == "kto" and recipe.train.batch_size == 1:
        raise RecipeError(
            "train.batch_size = 1: the KL of a step needs answers of other examples; raise it, or "
            'set loss = "apo_zero_unpaired", which has no KL'
        )
    reference = plugin.reference or ""
    # A name on the hub has one slash.
    is_path = reference and (reference[0] in "./" or reference.count("/") > 1)
    if is_path and not Path(reference).exists():
        raise RecipeError(f"reference: {reference}: no such folder")
