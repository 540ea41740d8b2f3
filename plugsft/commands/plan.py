"""`plugsft plan`: forecast memory."""

from typing import Annotated

import typer

from ..base.sizes import SIZES
from .options import Overrides, RecipeFile, Without, same_words


def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    gpus: Annotated[
        str, typer.Option(metavar="N|MxN", help="Number of GPUs, as 8; or machines x GPUs, as 4x8.")
    ] = "1",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=f"Memory of each GPU, as 80GiB; {SIZES} Default: that of --gpu, or of this "
            "machine's GPU, or of this machine.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="H100, H200, B200, A100, ... Default: any GPU of --memory, or this machine.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Train some steps on this machine, and correct the forecast."),
    ] = False,
) -> None:
    """Forecast the memory of a run, on GPUs here or elsewhere."""
    from ..output.folder import ensure_inputs
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    ensure_inputs(loaded, recipe)
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..lab.forecast import run as forecast

    words = same_words(recipe, overrides, without)
    forecast.plan(loaded, active, words, forecast.Options(gpus, memory, gpu, probe))
