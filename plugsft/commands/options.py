"""Arguments and options that several commands share."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..start.train import Start

RECIPES = (".toml", ".yaml", ".yml")
"""Endings of recipe files."""


def complete_recipe(incomplete: str) -> list[str]:
    """Complete a recipe's name: recipes of this folder and its subfolders."""
    folder = incomplete.rpartition("/")[0]
    patterns = [f"{place}*{ending}" for place in ("", "*/") for ending in RECIPES]
    paths = [path for pattern in patterns for path in Path(folder).glob(pattern)]
    return sorted(str(path) for path in paths if str(path).startswith(incomplete))


RecipeFile = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe in TOML or YAML.",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.PATH=VALUE", help="Change keys: train.batch_size=8"),
]
Without = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Switch a plugin off; may be repeated."),
]
Trusted = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the model."),
]
Launch = Annotated[
    str,
    typer.Option(
        metavar="COMMAND",
        help='Launch ranks with it: "accelerate launch --config_file FILE". Default: one process.',
    ),
]

ResumeLatest = Annotated[
    bool,
    typer.Option("--resume", help="Resume from the latest checkpoint."),
]
ResumeAuto = Annotated[
    bool,
    typer.Option("--resume-auto", help="Resume from the latest checkpoint, or start without one."),
]
ResumeFrom = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Resume from this checkpoint.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the results of an earlier run.")
]


def same_words(recipe: Path, overrides: Sequence[str] | None, without: Sequence[str] | None) -> str:
    """Return the words of a command that name the same recipe with the same changes."""
    changes = [*(overrides or []), *(f"--without={name}" for name in without or [])]
    return shlex.join([str(recipe), *changes])


def train_words(
    recipe: Path,
    overrides: Sequence[str] | None,
    without: Sequence[str] | None,
    start: Start,
) -> list[str]:
    """Return the words of the command that trains this recipe from this start."""
    options = {
        "--resume": start.latest,
        "--resume-auto": start.auto,
        f"--resume-from={start.path}": start.path,
        "--overwrite": start.overwrite,
    }
    chosen = [option for option, is_set in options.items() if is_set]
    return [*shlex.split(same_words(recipe, overrides, without)), *chosen]
