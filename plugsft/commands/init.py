"""`plugsft init`: a first recipe, its data, and launch files."""

from pathlib import Path
from typing import Annotated

import typer


def complete_kind(incomplete: str) -> list[str]:
    """Complete the name of a bundled recipe."""
    from .bundled_recipes import kinds

    return [kind for kind in kinds() if kind.startswith(incomplete)]


def init(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="[KIND]",
            help="sft, lora, dpo, ...; without it, all are listed.",
            show_default=False,
            autocompletion=complete_kind,
        ),
    ] = "",
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to.")] = Path(),
    list_kinds: Annotated[bool, typer.Option("--list", help="List all kinds.")] = False,
) -> None:
    """Write a commented recipe, with its data and launch files."""
    from .bundled_recipes import print_kinds, write

    if list_kinds or not kind:
        print_kinds()
    else:
        write(kind, to)
