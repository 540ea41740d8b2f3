"""Commands about a trained model: `chat` and `export`."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from ..base.errors import PlugsftError
from ..recipe.tables import HUB
from .options import Trusted, Without

MODELS = "Default: as the model's generation_config says."


def chat(
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="A run's output folder, or a model folder.")
    ],
    ask: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Ask this, print the answer, and exit."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of the longest answer.")
    ] = 256,
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system message.")] = "",
    temperature: Annotated[
        float, typer.Option(metavar="N", min=0, help="0: always the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P", help=f"Sample from the likeliest tokens with this probability. {MODELS}"
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="N", help=f"Sample from this number of the likeliest tokens. {MODELS}"
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(metavar="N", help=f"Above 1: repetitions are less likely. {MODELS}"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Repeat the same random answers.")
    ] = None,
    trust_remote_code: Trusted = False,
) -> None:
    """Talk to a trained model."""
    from ..export.answers import Answers
    from ..export.folder import model_folder

    options = Answers(
        max_tokens=max_tokens,
        temperature=temperature,
        system=system,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    folder = model_folder(output)
    # A missing folder is reported before anything heavy is imported.
    from ..export import chat

    chat.chat(folder, ask or [], options, trust_remote_code)


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
            help="A new folder, or hub:OWNER/NAME. Default with --merge: OUTPUT/merged.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier export wrote.")
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="On the hub: a public repository. Default: private.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            metavar="TYPE",
            help="With --merge: float32, bfloat16 or float16. Default: model.dtype of the run.",
        ),
    ] = None,
    without: Without = None,
    trust_remote_code: Trusted = False,
) -> None:
    """Copy, upload or merge a model, or make one of a checkpoint."""
    from ..export.folder import ensure_exportable, ensure_model, find_model

    if dtype and not merge:
        raise PlugsftError("--dtype is for merged weights; add --merge, or leave it out")
    if str(to).startswith(HUB):
        if overwrite:
            raise PlugsftError("--overwrite is for folders; leave it out: an upload is a commit")
        ensure_model(output)
        from ..export.hub import Repository
        from ..export.verified import source_of

        repository = Repository(str(to).removeprefix(HUB), public)
        if find_model(output) and not merge:
            repository.upload(source_of(output), output)
            return
        from ..base.atomic import temporary_ending
        from ..export import export

        parent = output.absolute().parent
        with TemporaryDirectory(temporary_ending(), ".export-", parent) as temporary:
            folder = Path(temporary, "model")
            export.export(
                output, merge, folder, without or [], trust_remote_code, repository.name, dtype
            )
            repository.upload(folder, output)
        return
    if public:
        raise PlugsftError("--public is for the hub; add --to hub:OWNER/NAME, or leave it out")
    target = ensure_exportable(output, merge, to, overwrite)
    # A missing folder is reported before anything heavy is imported.
    from ..export import export

    export.export(output, merge, target, without or [], trust_remote_code, dtype=dtype)
