"""Upload the model of a run, or a merged one, with its model card."""

from pathlib import Path

from ...base.atomic import MANIFEST
from ...base.console import say
from ...base.step_folders import parse_step
from ...output.folder import ADAPTER, base_model
from .card import CARD, card_for, run_of
from .hub import Repository
from .verified import source_of


def upload_model(repository: Repository, output: Path) -> None:
    """Compare a run's model with its checksums, and upload it."""
    upload_folder(repository, source_of(output), output)


def upload_folder(repository: Repository, folder: Path, output: Path) -> None:
    """Upload the model in a folder; `output` is its run or checkpoint."""
    files: dict[str, Path | bytes] = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST and not path.name.startswith(".")
    }
    if (folder / ADAPTER).is_file() and Path(base := base_model(folder)[0]).is_absolute():
        say(
            f"warning: the adapters are for {base}, a folder of this machine. Their file has this "
            "path, and others cannot load them: upload a merged model instead (--merge)"
        )
    card = card_for(folder, output, repository.name)
    if card is not None:
        files[CARD] = card.encode()
    run, step = run_of(output), parse_step(output)
    model = "the model" if step is None else f"the model of step {step:,}"
    repository.upload(files, f"plugsft: {model} of {(run or output.absolute()).name}")
    say(f"model, compared with the hub: {repository.url}")
