"""`plugsft quickstart`: a model to talk to, in a minute."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Overrides


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
