"""What is wrong with a recipe, its plugins or its weights, found before a model is loaded."""

from collections.abc import Sequence

from ..base.errors import RecipeError
from ..base.machine import Machine
from ..hooks import is_core
from ..recipe.tables import Recipe
from ..registry.active import Active, check
from ..tokens.schema import WEIGHT
from ..tokens.store import Tokens
from .config import ensure_model_fits


def ensure_trainable(
    recipe: Recipe, active: Active, machine: Machine, hooks: Sequence[str] | None = None
) -> None:
    """Refuse settings that would fail later; `hooks` limits the plugins that are asked."""
    check(active, recipe, machine, hooks)
    ensure_model_fits(recipe)


def ensure_example_weights(recipe: Recipe, active: Active, tokens: Tokens) -> None:
    """Refuse weights of examples that the loss would ignore."""
    weights = tokens.columns.get(WEIGHT)
    if weights is None or (weights == 1).all():
        return
    providers = [capability.plugin for capability in recipe.providers("weighted_examples")]
    for name in active.answering("step"):
        if not is_core(name) and name not in providers:
            raise RecipeError(
                f"plugins.{name}: its loss may ignore the weights of the rows (column 'weight'); "
                'data.ignore = ["weight"] trains without them. A plugin that applies them says so: '
                'provides={"weighted_examples": None}'
            )
