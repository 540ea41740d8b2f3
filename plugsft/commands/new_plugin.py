"""`plugsft new-plugin`: the skeleton of a plugin of one's own."""

from pathlib import Path
from typing import Annotated

import typer


def new_plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its name in recipes: lower case, underscores.")
    ],
    folder: Annotated[Path, typer.Option(help="Where to make its folder.")] = Path(),
) -> None:
    """Write the skeleton of a plugin of your own, with its test."""
    from .skeleton import write_skeleton

    write_skeleton(name, folder)
