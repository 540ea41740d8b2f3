"""`plugsft chat`: talk to a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Trusted

MODELS = "Default: as the model's generation_config says."


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
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="The system message.", show_default=False)
    ] = "",
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(help=f"Sample from the likeliest tokens with this probability. {MODELS}"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help=f"Sample from this number of the likeliest tokens. {MODELS}")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help=f"Above 1: repetitions are less likely. {MODELS}")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Repeat the same random answers.", show_default=False)
    ] = None,
    trust_remote_code: Trusted = False,
) -> None:
    """Talk to a trained model."""
    from .runs.answers import Answers
    from .runs.model_folder import model_folder

    options = Answers(max_tokens, temperature, system, top_p, top_k, repetition_penalty, seed)
    folder = model_folder(output)
    # A missing folder is reported before anything heavy is imported.
    from .runs import chat

    chat.chat(folder, ask or [], options, trust_remote_code)
