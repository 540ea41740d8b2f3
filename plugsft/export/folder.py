"""Find the model in a run's output folder, or its newest checkpoint; explain a missing one."""

import os
from pathlib import Path

from ..base.atomic import damage, foreign_files, is_published, parse_step
from ..base.errors import CheckpointError, PlugsftError
from ..base.limits import read_json_object
from ..output.folder import (
    ADAPTER,
    find_run,
    how_to_continue,
    is_model,
    newest_checkpoint,
    suggest_name,
)


def model_folder(output: Path) -> Path:
    """Return the folder of a run's model, or of any Hugging Face model; explain a missing one."""
    if (folder := find_model(output)) is not None:
        return folder
    if not output.exists():
        raise PlugsftError(
            f"{output}: no such folder{suggest_name(output) or ';'} name a run's output folder "
            "(output in its recipe), or a model's folder"
        )
    if output.is_file():
        raise PlugsftError(f"{output}: is a file; name the output folder of a run")
    run = find_run(output)
    if not run.steps.total:
        raise PlugsftError(
            f"{output}: holds no model; name the output folder of a finished run, or a Hugging "
            "Face folder with a config.json"
        )
    steps = f"step {run.steps.done} of {run.steps.total}"
    state = f"its run ended at {steps}; continue with: {how_to_continue(output)}"
    if run.status == "running":
        state = f"its run is at {steps}; wait for its end"
    if newest := newest_checkpoint(output / "checkpoints"):
        state += f"; plugsft export {output} --to FOLDER makes a model of {newest.name}"
    raise PlugsftError(f"{output}: has no model yet: {state}")


def checkpoint_of(output: Path) -> Path | None:
    """Return the folder itself if it is a checkpoint, or the newest checkpoint in it."""
    own = (output / "state.json").is_file()
    path = output if own else newest_checkpoint(output / "checkpoints") or newest_checkpoint(output)
    if path and (wrong := damage(path)) is not None:
        raise CheckpointError(f"{path}: the checkpoint is damaged: {wrong}; name another")
    return path


def ensure_exportable(output: Path, merge: bool, to: Path | None, overwrite: bool = False) -> Path:
    """Return the folder to export to; refuse one that exists, or an output without a model.

    `overwrite`: what an earlier export wrote may be replaced.
    """
    if to is None and not merge:
        raise PlugsftError(
            "--to: missing; name the folder to copy the model to, or hub:OWNER/NAME to upload it"
        )
    target = to or output / "merged"
    if any(is_published(it) or (is_model(it) and not merge) for it in target.resolve().parents):
        raise PlugsftError(
            f"{target}: is inside a checkpoint's or a model's own folder; name another with --to"
        )
    if target.exists() and not overwrite:
        raise PlugsftError(
            f"{target}: exists already; name another with --to, or add --overwrite, which replaces "
            "what an earlier export wrote"
        )
    of_run = target.name == "model" or parse_step(target) is not None
    if (of_run and target.exists()) or foreign_files(target, sized=True):
        raise PlugsftError(
            f"{target}: belongs to a run, or has files that no export wrote; name another with --to"
        )
    ensure_model(output)
    return target


def ensure_model(output: Path) -> None:
    """Refuse an output without a model or a checkpoint, and weights that were not copied."""
    for path in output.glob("*.safetensors"):
        if not path.stat().st_size:
            raise PlugsftError(f"{path}: is empty; copy the model again")
    if find_model(output) is None and checkpoint_of(output) is None:
        model_folder(output)  # raises the error


def find_model(output: Path) -> Path | None:
    """Find the model's folder: that of a finished run, or the folder itself."""
    return next(filter(is_model, (output / "model", output)), None)


def is_reward_model(folder: Path) -> bool:
    """Tell whether a folder holds a model, or adapters of one, that scores answers."""
    if (folder / ADAPTER).is_file():
        return read_json_object(folder / ADAPTER).get("task_type") == "SEQ_CLS"
    classes = read_json_object(folder / "config.json").get("architectures") or []
    return any(str(name).endswith("ForSequenceClassification") for name in classes)


def ensure_no_links(folder: Path) -> None:
    """Refuse links out of a model's folder: an upload would publish what they lead to."""
    for path in folder.rglob("*"):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder.resolve()):
            raise PlugsftError(
                f"{path}: leads out of the model's folder; put the file itself in its place"
            )
