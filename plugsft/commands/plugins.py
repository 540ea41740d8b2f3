"""`plugsft plugins`: list the plugins, or who answers and wraps each hook of a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Overrides, Without


def plugins(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE", help="A recipe in TOML, YAML or JSON.", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    without: Without = None,
) -> None:
    """List all plugins; with a recipe, its hooks and who answers them."""
    from . import recipe_overview

    if recipe is None:
        recipe_overview.list_plugins()
    else:
        recipe_overview.list_hooks(recipe, overrides or [], without or [])
