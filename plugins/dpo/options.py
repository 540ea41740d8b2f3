"""Options of a loss that have no effect, or that contradict the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugsft import Capability, Recipe, RecipeError

from .losses import LOSSES, Options

if TYPE_CHECKING:
    from . import Dpo


def ensure_options_work(plugin: Dpo, recipe: Recipe) -> None:
    """Refuse options that would have no effect."""
    _ensure_loss_uses_options(plugin)
    if not LOSSES[plugin.loss].reference:
        _ensure_no_reference(plugin, recipe)
    if plugin.share_prompt and not recipe.provides("packed_rows"):
        packing = Capability.bundled("packed_rows").table
        raise RecipeError(f"share_prompt is for packed rows; add {packing}")


def _ensure_loss_uses_options(plugin: Dpo) -> None:
    """Refuse an option that is set and not in the loss."""
    for name in Options._fields:
        if getattr(plugin, name) is not None and name not in LOSSES[plugin.loss].defaults:
            users = ", ".join(loss for loss in LOSSES if name in LOSSES[loss].defaults)
            raise RecipeError(
                f'{name} has no effect with loss = "{plugin.loss}"; remove it (losses that use '
                f"it: {users})"
            )


def _ensure_no_reference(plugin: Dpo, recipe: Recipe) -> None:
    """Refuse a reference for a loss that has none."""
    stored = recipe.provides("stored_reference")
    if plugin.reference or stored:
        useless = "reference" if plugin.reference else str(stored and stored.table)
        raise RecipeError(
            f'{useless} has no effect with loss = "{plugin.loss}", which has no reference; '
            "remove it"
        )
