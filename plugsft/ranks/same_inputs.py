"""Compares the inputs of all ranks before step 1: recipe, plugins, data, model and plan.

Two machines may find different rows, models or code under the same path. No loss would show it, so
each rank describes its inputs, and the ranks compare the descriptions.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

import xxhash

from ..base.checksums import digest
from ..model.load import Load
from ..model.weight_files import find_weight_files
from ..recipe.parse import flatten
from ..recipe.tables import Recipe

SAME_INPUTS = (
    "All machines must have the same recipe, plugins, data and model; check that each path has the "
    "same files on all of them"
)
PLACES = ("output", "data.source", "data.tokens", "eval.source", "model.path", "model.tokenizer")
"""Paths that may differ between machines: their contents are compared instead."""
MODEL_FILES = "the model's files"
SAMPLES, SAMPLE = 32, 4096
"""Samples of each weight file that are compared, and the bytes of each sample."""


def recipe_facts(recipe: Recipe) -> dict[str, str]:
    """Describe the recipe, without plugins, and the version of plugsft."""
    keys = flatten(recipe.model_dump(exclude_none=True) | {"plugins": {}})
    facts = {key: repr(value) for key, value in keys.items() if not key.startswith(PLACES)}
    return facts | {"the version of plugsft": importlib.metadata.version("plugsft")}


def model_facts(model: Any, load: Load) -> dict[str, str]:
    """Describe the model of this rank by its configuration and samples of its files.

    Weights in memory follow from these, from the seed and from the plugins, compared before.
    """
    config = {name: repr(value) for name, value in model.config.to_dict().items()}
    files = sorted({*find_weight_files(load.path, load.kwargs.get("revision")).values()})
    return {
        "the model's configuration": digest(config | {"_name_or_path": ""})[:8],
        MODEL_FILES: digest({Path(file).name: _sampled(Path(file)) for file in files})[:8],
    }


def _sampled(file: Path) -> str:
    """Return a file's size and a checksum of samples from all of it."""
    size, checksum = file.stat().st_size, xxhash.xxh3_64()
    with file.open("rb") as opened:
        for sample in range(SAMPLES):
            opened.seek(size * sample // SAMPLES)
            checksum.update(opened.read(SAMPLE))
    return f"{size} {checksum.hexdigest()}"
