"""`plugsft inspect`: show rows as the model will see them, and audit the data."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Overrides, RecipeFile, Without


def inspect(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    rows: Annotated[int, typer.Option(metavar="N", min=0, help="Number of rows to show.")] = 3,
    first: Annotated[
        int, typer.Option(metavar="N", min=0, help="First row to show, counted from 0.")
    ] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help="Audit every row, not a sample of 1,000.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a page to this file.", show_default=False),
    ] = None,
) -> None:
    """Show rows as the model will see them, and audit the data."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    # A mistake in the recipe is reported before anything heavy is imported.
    from .audit.inspect import inspect_data

    inspect_data(loaded, active, recipe.stem, rows, first, everything, html)
