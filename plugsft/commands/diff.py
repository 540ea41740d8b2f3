"""`plugsft diff`: compare two runs."""

from pathlib import Path
from typing import Annotated

import typer


def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run's output folder.")],
    second: Annotated[
        Path,
        typer.Argument(metavar="RUN_B", help="Another run's output folder."),
    ],
) -> None:
    """Compare two runs: recipe, versions, data and results."""
    from ..output import diff

    diff.diff(first, second)
