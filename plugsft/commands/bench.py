"""`plugsft bench`: measure what each plugin costs and brings."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Launch, Overrides, RecipeFile, Without

Rounds = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Each runs everything once; fewer than 3 cannot tell."),
]
Steps = Annotated[int, typer.Option(metavar="N", min=1, help="Measured steps of each run.")]
Warmup = Annotated[int, typer.Option(metavar="N", min=0, help="Steps before the measured ones.")]
Instead = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:KEY=VALUE",
        help="Where plugin NAME is off, set a key: bfd_packing:train.micro_batch=8.",
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Leave this plugin on in every run."),
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Measure only this plugin."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Where to write. Default: OUTPUT-bench."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier bench.")]


def bench(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    rounds: Rounds = 5,
    steps: Steps = 10,
    warmup: Warmup = 3,
    launch: Launch = "",
    instead: Instead = None,
    keep: Keep = None,
    only: Only = None,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure what each plugin does to speed, memory and results."""
    from ..output.folder import ensure_inputs
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    ensure_inputs(loaded, recipe)
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..lab import bench as lab

    settings = {
        "rounds": rounds,
        "steps": steps,
        "warmup": warmup,
        "launch": launch,
        "instead": instead or [],
    }
    lab.bench(loaded, active, recipe, settings, keep or [], only or [], out, overwrite)
