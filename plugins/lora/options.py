"""Options of lora that contradict each other, the recipe or the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugsft import Recipe, RecipeError

if TYPE_CHECKING:
    from . import Lora


def ensure_options_work(plugin: Lora, recipe: Recipe) -> None:
    """Refuse options that cannot work, before peft is imported."""
    if recipe.model.weights != "float32":
        raise RecipeError("adapters are always trained in float32; remove model.weights")
    if plugin.init == "orthogonal" and plugin.r % 2:
        raise RecipeError(f'init = "orthogonal" needs an even r; it is {plugin.r}')
    if not plugin.train_new_tokens:
        return
    if not recipe.model.add_tokens:
        raise RecipeError("train_new_tokens: the recipe has no model.add_tokens; remove it")
    if plugin.fused_head:
        raise RecipeError(
            f"train_new_tokens: {plugin.fused_head.table} reads the frozen weight of the head; "
            "remove one of them"
        )
    if plugin.adapter:
        raise RecipeError(
            "train_new_tokens: the adapters to go on from have no rows of new tokens; merge them "
            f"first (plugsft export {plugin.adapter} --merge), and name the result in model.path"
        )
