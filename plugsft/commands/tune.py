"""`plugsft tune`: find the fastest micro-batch that fits."""

from pathlib import Path
from typing import Annotated

import typer

from ..base.sizes import SIZES
from .options import Launch, Overrides, RecipeFile, Without


def tune(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=f"Limit per rank, as 20GiB; {SIZES} Default: the GPU's memory, or a rank's share "
            "of the machine's.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measured steps of each probe.")
    ] = 8,
    launch: Launch = "",
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write the recipe. Default: RECIPE.tuned.toml.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Find the fastest micro-batch that fits; write a recipe with it."""
    from ..output.folder import ensure_inputs
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    ensure_inputs(loaded, recipe)
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..lab import tune as lab

    options = lab.Options(overrides or [], without or [], memory, steps, launch, to)
    lab.tune(loaded, active, recipe, options)
