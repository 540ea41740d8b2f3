"""Refuse examples longer than the model's context. Needs no transformers."""

from ..base.errors import RecipeError
from ..recipe.tables import Recipe


def ensure_context(recipe: Recipe, context: int | None) -> None:
    """Refuse a data.max_length beyond the context; None: the context is not known."""
    if context is not None and recipe.data.max_length > context:
        raise RecipeError(
            f"data.max_length: given {recipe.data.max_length}, but the model's context is "
            f"{context} tokens; set data.max_length = {context}"
            + (", or raise model.scratch.context" if recipe.model.scratch else "")
        )
