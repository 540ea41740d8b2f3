"""What is wrong with a recipe and its plugins, found before anything is loaded."""

from collections.abc import Sequence

from ..base.machine import Machine
from ..recipe.tables import Recipe
from ..registry.active import Active, check
from .config import check_context
from .schedule import check_schedule


def check_recipe(
    recipe: Recipe, active: Active, machine: Machine, hooks: Sequence[str] | None = None
) -> None:
    """Refuse settings that would fail later; `hooks` limits the plugins that are asked."""
    check(active, recipe, machine, hooks)
    check_context(recipe)
    check_schedule(recipe.train)
