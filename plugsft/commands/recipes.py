"""Commands about recipes and plugins: `init`, `check`, `plugins`, `convert` and their like."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..base.console import say
from .options import RECIPES, Overrides, RecipeFile, Without, complete_recipe, same_words


def complete_kind(incomplete: str) -> list[str]:
    """Complete the name of a bundled recipe."""
    from .starting_files import kinds

    return [kind for kind in kinds() if kind.startswith(incomplete)]


def init(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="sft, lora, dpo, ...; without it, all are listed.",
            autocompletion=complete_kind,
        ),
    ] = "",
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to.")] = Path(),
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The model to train: a hub name or a folder.")
    ] = "",
    data: Annotated[
        str, typer.Option(metavar="DATA", help="The data: a file, a folder or a hub name.")
    ] = "",
) -> None:
    """Write a commented recipe, with its data and launch files."""
    from .starting_files import print_kinds, write

    if kind:
        write(kind, to, {"path": model, "source": data})
    else:
        print_kinds()


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
    name: Annotated[
        Path | None,
        typer.Argument(
            metavar="NAME|RECIPE",
            help="A plugin, or a recipe in TOML or YAML.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: Overrides = None,
    without: Without = None,
) -> None:
    """List all plugins, explain one, or show who answers the hooks of a recipe."""
    from . import overview

    if name is None:
        overview.list_plugins()
    elif overrides or without or name.is_file() or name.suffix in RECIPES:
        overview.list_hooks(name, overrides or [], without or [])
    else:
        overview.show_plugin(str(name))


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
        typer.Option(
            metavar="KIND", help="callback, format, loss or optimizer: each a working one."
        ),
    ] = "callback",
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write it to.")] = Path(),
) -> None:
    """Write the skeleton of a new plugin, with its test."""
    from .starting_files import write_skeleton

    write_skeleton(name, folder, kind)
