"""`plugsft export`: copy a trained model, make one from a checkpoint, or merge adapters."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Trusted, Without


def export(
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT", help="A run's output folder, a model folder, or a checkpoint."
        ),
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into their base model.")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A new folder. Default with --merge: OUTPUT/merged.",
            show_default=False,
        ),
    ] = None,
    without: Without = None,
    trust_remote_code: Trusted = False,
) -> None:
    """Copy a trained model, make one from a checkpoint, or merge adapters."""
    from .runs.model_folder import ensure_exportable

    target = ensure_exportable(output, merge, to)
    # A missing folder is reported before anything heavy is imported.
    from .runs import export

    export.export(output, merge, target, without or [], trust_remote_code)
