"""The commands that measure a recipe, in trials of some steps."""

from pathlib import Path
from typing import Annotated

import typer

from .arguments import Overrides, RecipeFile, Without

measuring = typer.Typer()


Rounds = Annotated[int, typer.Option(min=1, help="Each run takes part once in each.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps of a run that are measured.")]
Warmup = Annotated[int, typer.Option(min=0, help="Steps before these.")]
Examples = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Examples to train on; 0 for all. Default: as many as the steps take.",
        show_default=False,
    ),
]
PrepareRounds = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Rounds of preparing all data; 0 for none. Default: as many as --rounds.",
        show_default=False,
    ),
]
Launch = Annotated[
    str,
    typer.Option(
        metavar="COMMAND",
        help='Starts ranks: "accelerate launch --config_file FILE". Default: one process.',
        show_default=False,
    ),
]
Instead = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:KEY.PATH=VALUE",
        help="Set a key where this plugin is off: bfd_packing:train.micro_batch=8.",
        show_default=False,
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Leave a plugin on in every run.", show_default=False),
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Measure this plugin.", show_default=False),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Where to write. Default: OUTPUT-bench.", show_default=False
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier bench there.")]
Against = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Compare with an earlier bench.json; exit code 1 if anything is worse.",
        show_default=False,
    ),
]
Tolerance = Annotated[float, typer.Option(min=0, help="How much worse is allowed: 0.05 is 5 %.")]


@measuring.command()
def bench(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    rounds: Rounds = 5,
    steps: Steps = 10,
    warmup: Warmup = 3,
    examples: Examples = None,
    prepare_rounds: PrepareRounds = None,
    launch: Launch = "",
    instead: Instead = None,
    keep: Keep = None,
    only: Only = None,
    out: Out = None,
    overwrite: Overwrite = False,
    against: Against = None,
    tolerance: Tolerance = 0.05,
) -> None:
    """Measure what each plugin costs and brings: alone, and left out of all, in fresh processes."""
    from .lab.bench import run as bench

    options = bench.Options(
        rounds=rounds,
        steps=steps,
        warmup=warmup,
        examples=examples,
        prepare_rounds=prepare_rounds,
        launch=launch,
        instead=instead or [],
        keep=keep or [],
        only=only or [],
        out=out,
        overwrite=overwrite,
        against=against,
        tolerance=tolerance,
    )
    bench.bench(recipe, overrides or [], without or [], options)


@measuring.command()
def tune(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Limit per rank: 20GiB, 500MB, ... Default: the GPU's memory, or a rank's share "
            "of the machine's.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a probe that are measured.")] = 8,
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
    """Find the fastest micro-batch or capacity that fits, by measure; write the recipe with it."""
    from .lab.tune import run as tune

    tune.tune(recipe, overrides or [], without or [], memory, steps, launch, to)


@measuring.command()
def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    gpus: Annotated[
        str, typer.Option(metavar="N|MxN", help="GPUs, or machines x GPUs of each.")
    ] = "1",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of each GPU: 80GB. Default: the GPU's own.", show_default=False
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="H100, H200, B200, A100, ... Default: this machine's.",
            show_default=False,
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Correct the forecast by real steps on this machine.")
    ] = False,
) -> None:
    """Forecast memory on any GPUs, without weights; say what fits, or what to change."""
    from .lab.forecast import run as forecast

    options = forecast.Options(gpus, memory, gpu, probe)
    forecast.plan(recipe, overrides or [], without or [], options)
