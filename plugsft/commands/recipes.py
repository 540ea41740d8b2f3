"""Commands about recipes and plugins: `init`, `check`, `plugins`, `convert` and their like."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..base.console import say
from .options import Overrides, RecipeFile, Without, same_words


def init(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="[KIND]",
            help="sft, lora, dpo, ...; without it, all are listed.",
        ),
    ] = "",
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to.")] = Path(),
    list_kinds: Annotated[bool, typer.Option("--list", help="List all kinds.")] = False,
) -> None:
    """Write a commented recipe, with its data and launch files."""
    from .starting_files import print_kinds, write

    if list_kinds or not kind:
        print_kinds()
    else:
        write(kind, to)


def check(
    recipe: RecipeFile,
    overrides: Overrides = None,
    without: Without = None,
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Ranks (processes) of the launch."),
    ] = None,
) -> None:
    """Find mistakes in recipe, plugins, data and disk before training."""
    from .load_recipe import load_recipe

    loaded, active = load_recipe(recipe, overrides, without)
    # A mistake in the recipe is reported before anything heavy is imported.
    from ..audit.check_recipe import check_recipe
    from ..start.before_run import option_to_start

    check_recipe(loaded, active, recipe, ranks)
    words = same_words(recipe, overrides, without)
    option, why = option_to_start(loaded, active)
    say(f"ready{why and ' '}{why}: plugsft {words}{option and ' '}{option}")


def plugins(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="A recipe in TOML, YAML or JSON."),
    ] = None,
    overrides: Overrides = None,
    without: Without = None,
) -> None:
    """List all plugins; with a recipe, its hooks and who answers them."""
    from . import overview

    if recipe is None:
        overview.list_plugins()
    else:
        overview.list_hooks(recipe, overrides or [], without or [])


def schema() -> None:
    """Print the JSON schema of recipes, plugins included, for editors."""
    from .overview import schema_text

    print(schema_text())


def convert(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A configuration of axolotl, LLaMA-Factory or TRL: YAML or JSON.",
        ),
    ],
    tool: Annotated[
        str,
        typer.Option(
            "--from", metavar="TOOL", help="axolotl, llamafactory or trl. Default: by its keys."
        ),
    ] = "",
    to: Annotated[
        Path | None,
        typer.Option(metavar="OUT.toml", help="Recipe to write. Default: FILE with .toml."),
    ] = None,
    gpus: Annotated[
        int, typer.Option(min=1, metavar="N", help="GPUs of the run; they count in its batch.")
    ] = 1,
    trainer: Annotated[
        str,
        typer.Option(metavar="NAME", help="For trl: sft, dpo, kto, reward. Default: by its keys."),
    ] = "",
) -> None:
    """Write another tool's configuration as a recipe."""
    from .converting.convert_file import convert_file

    convert_file(file, to or file.parent / f"{file.stem or 'recipe'}.toml", tool, trainer, gpus)


def new_plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its name in recipes: lower case, underscores.")
    ],
    kind: Annotated[
        Literal["callback", "format", "loss", "optimizer"],
        typer.Option(help="What the plugin does; the skeleton is a working one."),
    ] = "callback",
    folder: Annotated[Path, typer.Option(help="Folder to write it to.")] = Path(),
) -> None:
    """Write the skeleton of a new plugin, with its test."""
    from .starting_files import write_skeleton

    write_skeleton(name, folder, kind)
