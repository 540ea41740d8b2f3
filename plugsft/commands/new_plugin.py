"""`plugsft new-plugin`: the skeleton of a plugin of one's own."""

from pathlib import Path
from typing import Annotated, Literal

import typer


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
    from .skeleton import write_skeleton

    write_skeleton(name, folder, kind)
