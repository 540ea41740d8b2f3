"""`plugsft check`: find mistakes before training."""

from typing import Annotated

import typer

from ..base.console import say
from .options import Overrides, RecipeFile, Without, same_words


def check(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Ranks (processes) of the launch.", show_default=False
        ),
    ] = None,
) -> None:
    """Find mistakes in recipe, plugins, data and disk before training."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..start.output import option_to_start
    from .audit.recipe import check_recipe

    check_recipe(loaded, active, recipe, ranks)
    words = same_words(recipe, overrides, without)
    option, why = option_to_start(loaded, active)
    say(f"ready{why and ' '}{why}: plugsft {words}{option and ' '}{option}")
