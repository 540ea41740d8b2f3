"""The model of a run, compared with its checksums."""

from pathlib import Path

from ..base.atomic import damage, is_published
from ..base.errors import CheckpointError, PlugsftError
from ..base.limits import read_json_object
from ..checkpoint.contents import base_changes
from ..checkpoint.final_model import BASE
from ..model.config import ensure_safetensors
from ..model.weight_files import sampled_digest
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


def is_text_only(adapters: Path) -> bool:
    """Tell whether adapters are for the class for text of a base that sees."""
    file = adapters / BASE
    return file.is_file() and bool(read_json_object(file).get("text_only"))


def ensure_same_base(adapters: Path, base: str, revision: str | None) -> None:
    """Refuse adapters whose base model has other files than when they were trained."""
    file = adapters / BASE
    note = read_json_object(file) if file.is_file() else {}
    changes = base_changes(note, base, revision) if "checksums" in note else []
    # Before 0.2.0, samples of the files were compared.
    if note.get("files", "") not in ("", sampled_digest(base, revision)):
        changes = ["its files have changed"]
    if changes:
        raise PlugsftError(
            f"{adapters}: was trained on another model than {base} is now: {'; '.join(changes)}; "
            f"put the old files back, or train again (without {BASE}, adapters go with any)"
        )
