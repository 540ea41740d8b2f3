"""Commands that measure and forecast: `bench`, `tune` and `plan`."""

from typing import Annotated

import typer

from ..base.for_commands import SIZES
from .options import Launch, Overrides, RecipeFile, Without, same_words

Steps = Annotated[int, typer.Option(metavar="N", min=1, help="Measured steps of each run.")]


def bench(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Each runs everything once; fewer than 3 cannot tell."
        ),
    ] = 5,
    steps: Steps = 10,
    warmup: Annotated[
        int, typer.Option(metavar="N", min=0, help="Steps before the measured ones.")
    ] = 3,
    launch: Launch = "",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Measure only this plugin."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier bench.")
    ] = False,
) -> None:
    """Measure what each plugin does to speed, memory and results."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without, inputs=True)
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..lab import bench as lab

    settings = {"rounds": rounds, "steps": steps, "warmup": warmup, "launch": launch}
    lab.bench(loaded, active, recipe, settings, only or [], overwrite)


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
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without, inputs=True)
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..lab import tune as lab

    words = same_words(recipe, overrides, without)
    lab.tune(loaded, active, words, memory, steps, launch)


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
) -> None:
    """Forecast the memory of a run, on GPUs here or elsewhere."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without, inputs=True)
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..lab.forecast import run as forecast

    words = same_words(recipe, overrides, without)
    forecast.plan(loaded, active, words, gpus, memory, gpu)
