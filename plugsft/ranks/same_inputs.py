"""Compares the inputs of all ranks before step 1: recipe, plugins, data, model and plan.

Two machines may find different rows, models or code under the same path. No loss would show it, so
each rank describes its inputs, and the ranks compare the descriptions.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

import xxhash
from torch.nn import Module

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
TENSORS, NUMBERS = 64, 16
"""Tensors in memory that are compared, and the numbers of each."""


def recipe_facts(recipe: Recipe) -> dict[str, str]:
    """Describe the recipe, without plugins, and the version of plugsft."""
    keys = flatten(recipe.model_dump(exclude_none=True) | {"plugins": {}})
    facts = {key: repr(value) for key, value in keys.items() if not key.startswith(PLACES)}
    return facts | {"the version of plugsft": importlib.metadata.version("plugsft")}


def model_facts(model: Any, load: Load) -> dict[str, str]:
    """Describe the model of this rank, before it is sharded: samples of its files and weights."""
    config = {name: repr(value) for name, value in model.config.to_dict().items()}
    files = sorted({*find_weight_files(load.path, load.kwargs.get("revision")).values()})
    return {
        "the model's configuration": digest(config | {"_name_or_path": ""})[:8],
        MODEL_FILES: digest({Path(file).name: _sampled(Path(file)) for file in files})[:8],
        "the model's weights": _weights(model),
    }


def _sampled(file: Path) -> str:
    """Return a file's size and a checksum of samples from all of it."""
    size, checksum = file.stat().st_size, xxhash.xxh3_64()
    with file.open("rb") as opened:
        for sample in range(SAMPLES):
            opened.seek(size * sample // SAMPLES)
            checksum.update(opened.read(SAMPLE))
    return f"{size} {checksum.hexdigest()}"


def _weights(model: Module) -> str:
    """Return a checksum of samples of the unsharded weights."""
    checksum = xxhash.xxh3_64()
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        # Under ZeRO-3 each rank has its own shard.
        if not parameter.is_meta and not hasattr(parameter, "ds_id")
    ]
    for name, parameter in named[:: max(1, len(named) // TENSORS)]:
        sample = parameter.detach().flatten()[:NUMBERS].float().cpu().numpy()
        checksum.update(name.encode() + sample.tobytes())
    return checksum.hexdigest()[:8]
