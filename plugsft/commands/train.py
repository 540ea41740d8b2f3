"""`plugsft RECIPE`, `train`, `launch` and `quickstart`: train."""

from pathlib import Path
from typing import Annotated

import typer

from ..start.train import Start, train_recipe
from .options import (
    Overrides,
    Overwrite,
    RecipeFile,
    ResumeAuto,
    ResumeFrom,
    ResumeLatest,
    Without,
    train_words,
)


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    resume: ResumeLatest = False,
    resume_auto: ResumeAuto = False,
    resume_from: ResumeFrom = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a model; `plugsft RECIPE` does the same."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    start = Start(resume, resume_auto, resume_from, overwrite)
    train_recipe(loaded, active, recipe, start)


Ranks = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Ranks of each machine. Default: one for each visible GPU, else 1."
    ),
]


def launch(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Ranks = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="ddp|fsdp2|zero3", help="Default: ddp."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of machines.")
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Number of this machine, from 0."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Name or address of machine 0."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=65535, help="Free port of machine 0. Default: 29500."),
    ] = None,
    without: Without = None,
    resume: ResumeLatest = False,
    resume_auto: ResumeAuto = False,
    resume_from: ResumeFrom = None,
    overwrite: Overwrite = False,
) -> None:
    """Train on several GPUs or machines: print the line of `accelerate launch`, and run it."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without, inputs=True)
    start = Start(resume, resume_auto, resume_from, overwrite)
    start.ensure_possible()
    # A mistake in the recipe is reported before torch is imported.
    from ..start.launch import Options, is_rank, join, launch_ranks

    options = Options(ranks, strategy, nodes, node, host, port)
    if is_rank():
        join(options)
        train_recipe(loaded, active, recipe, start)
    else:
        words = train_words(recipe, overrides, without, start)
        launch_ranks(loaded, words, options)


def quickstart(
    overrides: Overrides = None,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to work in.")] = Path(),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of an earlier quickstart.")
    ] = False,
) -> None:
    """Train a small model in about a minute, offline, and talk to it."""
    from .first_model import first_model

    first_model(to, overrides or [], overwrite)
