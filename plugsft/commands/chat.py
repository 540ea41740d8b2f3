"""`plugsft chat`: talk to a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Trusted


def chat(
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="A run's output folder, or a model folder.")
    ],
    ask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Ask this, print the answer, and exit.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.0,
    trust_remote_code: Trusted = False,
) -> None:
    """Talk to a trained model."""
    from .runs.model_folder import model_folder

    folder = model_folder(output)
    # A missing folder is reported before anything heavy is imported.
    from .runs import chat

    chat.chat(folder, ask or [], max_tokens, temperature, trust_remote_code)
