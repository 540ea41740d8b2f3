"""Settings of a recipe that packing would ignore, or that contradict it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugsft import Recipe, RecipeError

if TYPE_CHECKING:
    from . import BfdPacking


def ensure_options_work(plugin: BfdPacking, recipe: Recipe) -> None:
    """Refuse settings that packing would ignore, or that contradict it."""
    if recipe.train.micro_batch > 1:
        capacity = recipe.train.micro_batch * plugin.max_tokens
        raise RecipeError(
            "capacity sets the size of a micro-batch, so train.micro_batch has no effect; "
            f"remove it; capacity = {capacity} takes about as many tokens at a time"
        )
    if plugin.overlong != "error" and recipe.provides("preference_pairs"):
        raise RecipeError(
            f'overlong = "{plugin.overlong}" would cut one answer of a pair; remove it, and '
            'raise capacity, or lower data.max_length with data.too_long = "truncate"'
        )
    if plugin.overlong == "split" and recipe.provides("labelled_answers"):
        raise RecipeError(
            'overlong = "split" would part an answer from its prompt; remove it, and raise '
            'capacity, or set overlong = "truncate"'
        )
    sampled = [source.source for source in recipe.data.all_sources() if source.weight % 1]
    if plugin.scope == "dataset" and sampled:
        raise RecipeError(
            f'scope = "dataset" cannot draw a new part of {sampled[0]} in each epoch, since '
            "epochs would have different numbers of steps; give it a whole weight, or set "
            'scope = "step"'
        )
