"""Upload the model of a run, or one that was made from it, with its model card."""

from pathlib import Path

from ...base.atomic import MANIFEST
from ...base.console import say
from ...base.step_folders import parse_step
from .card import CARD, card_for, run_of
from .hub import Repository
from .verified import source_of


def upload_model(repository: Repository, output: Path) -> None:
    """Upload a run's model as it is, once it is compared with its checksums."""
    upload_folder(repository, source_of(output), output)


def upload_folder(repository: Repository, folder: Path, output: Path) -> None:
    """Upload a folder that comes from a run's output, its model or a checkpoint."""
    files: dict[str, Path | bytes] = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST and not path.name.startswith(".")
    }
    card = card_for(folder, output, repository.name)
    if card is not None:
        files[CARD] = card.encode()
    run, step = run_of(output), parse_step(output)
    what = "the model" if step is None else f"the model of step {step:,}"
    repository.upload(files, f"plugsft: {what} of {(run or output.absolute()).name}")
    say(f"model, compared with the hub: {repository.url}")
