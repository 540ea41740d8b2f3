"""Compares the inputs of all ranks before step 1: recipe, plugins, data, model and plan.

Two machines may find different rows, models or code under the same path. No loss would show it, so
each rank describes its inputs, and the ranks compare the descriptions.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

import xxhash
from accelerate import Accelerator
from torch.nn import Module

from ..base.checksums import digest
from ..batches.plan import Plan
from ..data.prepare import Prepared
from ..model.load import Load
from ..model.weight_files import files_of
from ..recipe.parse import flatten
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..tokens.store import Tokens
from .agree import ensure_alike

CURE = (
    "All machines must have the same recipe, plugins, data and model; check that each path has the "
    "same files on all of them"
)
PLACES = ("output", "data.source", "data.tokens", "eval.source", "model.path", "model.tokenizer")
"""Paths that may differ between machines: their contents are compared instead."""
SAMPLES, SAMPLE = 32, 4096
"""Samples of each weight file that are compared, and the bytes of each sample."""
TENSORS, NUMBERS = 64, 16
"""Tensors in memory that are compared, and the numbers of each."""


def ensure_same_inputs(
    accelerator: Accelerator, recipe: Recipe, active: Active, data: Prepared
) -> None:
    """Refuse ranks with different recipes, plugins or data."""
    flat = flatten(recipe.model_dump(exclude_none=True) | {"plugins": {}})
    facts = {key: repr(value) for key, value in flat.items() if not key.startswith(PLACES)}
    facts |= {key: repr(value) for key, value in active.options_affecting_results().items()}
    facts |= {f"the code of plugin {name}": active.source_digest(name) for name in active.plugins}
    facts["the version of plugsft"] = importlib.metadata.version("plugsft")
    facts["the training data"] = _tokens(data.tokens)
    if data.held_out is not None:
        facts["the evaluation data"] = _tokens(data.held_out)
    ensure_alike(accelerator, facts, CURE)


def model_facts(model: Any, load: Load) -> dict[str, str]:
    """Describe the model of this rank, before it is sharded: samples of its files and weights."""
    config = {name: repr(value) for name, value in model.config.to_dict().items()}
    files = sorted({*files_of(load.path, load.kwargs.get("revision")).values()})
    return {
        "the model's configuration": digest(config | {"_name_or_path": ""})[:8],
        "the model's files": digest({Path(file).name: _sampled(Path(file)) for file in files})[:8],
        "the model's weights": _weights(model),
    }


def plan_facts(plan: Plan) -> dict[str, str]:
    """Describe the number of steps, and the layout of the first."""
    window = plan.window(1)
    layout = [[examples.tolist() for examples in rank] for rank in window.layout]
    return {
        "the number of steps": f"{plan.steps:,}",
        "the order of examples": digest({"layout": layout, "targets": window.total})[:8],
    }


def _tokens(tokens: Tokens) -> str:
    key = {"key": tokens.facts["key"], "index": tokens.facts["index"]}
    count = tokens.facts["tokens"]
    return f"{len(tokens):,} examples of {count:,} tokens ({digest(key)[:8]})"


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
