"""What a model's files hold, so that a base is known again: its config.json and its weights."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash
from transformers.utils import CONFIG_NAME

from ..base.checksums import cached_file_digest, digest
from ..base.errors import PlugsftError, RecipeError
from ..base.limits import read_json_object
from ..recipe.parse import changed, flatten, show
from .weight_files import find_file, find_weight_files

BASE = "base_model.json"
"""File in a folder of adapters: what they go with."""
WEIGHTS = "the weights in the model's files"
NOT_LEARNED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of config.json that change no result: the recipe chooses the type of numbers."""
FILE_SAMPLES, SAMPLE_BYTES = 32, 4096
"""Samples of each file that a checksum of weights covers, and the bytes of each."""
SHA256_DIGITS = 64


def read_settings(path: str, revision: str | None, name: str) -> dict[str, Any]:
    """Read a JSON file of a model, if it has that file."""
    file = find_file(path, name, revision)
    return read_json_object(Path(file)) if file else {}


def settings_of(path: str, revision: str | None, name: str = CONFIG_NAME) -> dict[str, Any]:
    """Return what a model's config.json says, without what changes no result."""
    config = flatten(read_settings(path, revision, CONFIG_NAME))
    return {
        f"{name}: {key}": value
        for key, value in config.items()
        if key.rpartition(".")[2] not in NOT_LEARNED
    }


def base_changes(
    then: Mapping[str, Any], path: str, revision: str | None, weights: bool = True
) -> list[str]:
    """Say what a model's files hold otherwise than when a run stored what it learned from."""
    now, settings = settings_of(path, revision), then["settings"]
    before = {name: value for name, value in settings.items() if name.startswith(CONFIG_NAME)}
    changes = show(changed(before, now), before, now)
    if weights and then["checksums"][WEIGHTS] not in ("", weights_digest(path, revision)):
        changes.append(f"{WEIGHTS} changed")
    return changes


def read_base(adapters: Path) -> dict[str, Any]:
    """Read what adapters go with; other tools do not write it."""
    with suppress(OSError):  # adapters on a hub that cannot be reached
        return read_settings(str(adapters), None, BASE)
    return {}


def is_text_only(adapters: Path) -> bool:
    """Tell whether adapters are for the class for text of a base that sees."""
    return bool(read_base(adapters).get("text_only"))


def ensure_same_base(adapters: Path, base: str, revision: str | None) -> None:
    """Refuse adapters that were trained on another model than a base is now."""
    then = read_base(adapters)
    changes = base_changes(then, base, revision) if "checksums" in then else []
    # Until 0.2.0 samples of the files were noted.
    if then.get("files", "") not in ("", sampled_digest(base, revision)):
        changes = ["its files have changed"]
    if changes:
        raise PlugsftError(
            f"{adapters}: was trained on another model than {base} is now: {'; '.join(changes)}; "
            f"name or put back the old one, or train again (without {BASE}, adapters go with any)"
        )


def sampled_digest(path: str, revision: str | None) -> str:
    """Tell models apart by samples of their files: reading all of these would take minutes."""
    sampled = {}
    for file in map(Path, find_weight_files(path, revision)):
        size, checksum = file.stat().st_size, xxhash.xxh3_64()
        with file.open("rb") as opened:
            for sample in range(FILE_SAMPLES):
                opened.seek(size * sample // FILE_SAMPLES)
                checksum.update(opened.read(SAMPLE_BYTES))
        sampled[file.name] = f"{size} {checksum.hexdigest()}"
    return digest(sampled)[:8]


def weights_digest(path: str, revision: str | None) -> str:
    """Return a checksum of a pretrained model's weights, cached while its files are unchanged."""
    files = find_weight_files(path, revision)
    if not files:
        raise RecipeError(f"{path}: it has no weights in safetensors; save them in that format")
    return digest({Path(file).name: _weights_file_digest(Path(file)) for file in files})


def _weights_file_digest(path: Path) -> str:
    """Return the sha256 of a file, which is its name in the hub's cache."""
    stored = path.resolve()
    if stored.parent.name == "blobs" and len(stored.name) == SHA256_DIGITS:
        return stored.name
    return cached_file_digest(path, hashlib.sha256)
