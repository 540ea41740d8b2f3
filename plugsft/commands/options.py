"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe in TOML.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.PATH=VALUE", help="Change keys for this run.", show_default=False),
]
Without = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Switch a plugin off for this run.", show_default=False),
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
        show_default=False,
    ),
]
