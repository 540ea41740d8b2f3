"""`plugsft tune`: find the fastest micro-batch that fits."""

from typing import Annotated

import typer

from ..base.sizes import SIZES
from .options import Launch, Overrides, RecipeFile, Without, same_words


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
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measured steps of each probe.")
    ] = 8,
    launch: Launch = "",
) -> None:
    """Find the fastest micro-batch that fits."""
    from ..output.folder import ensure_inputs
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    ensure_inputs(loaded, recipe)
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..lab import tune as lab

    words = same_words(recipe, overrides, without)
    lab.tune(loaded, active, words, memory, steps, launch)
