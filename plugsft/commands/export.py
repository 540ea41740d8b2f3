"""`plugsft export`: copy, upload or merge a trained model."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from ..base.errors import PlugsftError
from .hub_names import HUB
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
            help="A new folder, or hub:OWNER/NAME. Default with --merge: OUTPUT/merged.",
            show_default=False,
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="On the hub: a public repository. Default: private.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            help="With --merge: the type of the weights. Default: model.dtype of the run's recipe.",
            show_default=False,
        ),
    ] = None,
    without: Without = None,
    trust_remote_code: Trusted = False,
) -> None:
    """Copy, upload or merge a model, or make one of a checkpoint."""
    from .runs.model_folder import ensure_exportable, ensure_model, has_model

    if dtype and not merge:
        raise PlugsftError("--dtype is for merged weights; add --merge, or leave it out")
    if str(to).startswith(HUB):
        ensure_model(output)
        from .runs.hub import Repository
        from .runs.verified import source_of

        repository = Repository(str(to).removeprefix(HUB), public)
        if has_model(output) and not merge:
            repository.upload(source_of(output), output)
            return
        from ..base.atomic import temporary_ending
        from .runs import export

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
    target = ensure_exportable(output, merge, to)
    # A missing folder is reported before anything heavy is imported.
    from .runs import export

    export.export(output, merge, target, without or [], trust_remote_code, dtype=dtype)
