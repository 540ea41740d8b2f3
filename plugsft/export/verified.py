"""The model of a run, compared with its checksums."""

from pathlib import Path

from ..base.atomic import damage, is_published
from ..base.errors import CheckpointError
from ..model.config import ensure_safetensors
from .folder import model_folder


def source_of(output: Path) -> Path:
    """Return the folder of a run's model; refuse a damaged one."""
    folder = model_folder(output)
    ensure_safetensors(str(folder))
    if is_published(folder) and (wrong := damage(folder)) is not None:
        raise CheckpointError(
            f"{folder}: is damaged: {wrong}; remove it and resume the run (--resume), which "
            "writes it again from the last checkpoint"
        )
    return folder
