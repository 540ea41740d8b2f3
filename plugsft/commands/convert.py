"""`plugsft convert`: a configuration of another tool as a recipe."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A configuration of axolotl, LLaMA-Factory or TRL: YAML, JSON, or a shell line.",
            show_default=False,
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
