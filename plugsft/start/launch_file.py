"""The file that `accelerate config` writes, by which `plugsft launch` starts ranks. No torch."""

import os
from contextlib import suppress
from pathlib import Path

from ..ranks.launcher import ensure_settings
from ..recipe.parse import flatten
from ..recipe.read_yaml import parse_yaml
from ..recipe.tables import Recipe


def default_launch_file() -> Path:
    """Where accelerate looks for it."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{cache}/huggingface")
    return Path(home, "accelerate/default_config.yaml").expanduser()


def ensure_launch_file(path: Path, recipe: Recipe) -> None:
    """Refuse a launch file that contradicts the recipe."""
    with suppress(OSError, ValueError):  # accelerate says what is wrong with it
        tables = flatten(parse_yaml(path.read_text(), str(path)))
        settings = {key.rpartition(".")[2]: value for key, value in tables.items()}
        ensure_settings(settings, recipe, str(path))
