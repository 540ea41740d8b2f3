"""What must be equal on all ranks before step 1: recipe, plugins, data, model and plan.

Two machines may find other rows, another model or other code under one path. Nothing of that shows
in a loss, so each rank describes what it has, and the ranks compare.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

import xxhash
from accelerate import Accelerator
from torch.nn import Module

from .agree import ensure_alike
from .digests import digest
from .models import Load
from .plan import Plan
from .prepare import Prepared
from .reading import flatten
from .recipe import Recipe
from .registry import Active
from .tokens import Tokens
from .weights import files_of

CURE = (
    "Each machine must have the same recipe, plugins, data and model; see whether a path means the "
    "same files on all of them"
)
PLACES = ("output", "data.source", "data.tokens", "eval.source", "model.path", "model.tokenizer")
"""Keys of a recipe that may name other places on other machines: what lies there is compared."""
SAMPLES, SAMPLE = 32, 4096
"""Of a file of weights, the places that are compared, and the bytes of each."""
TENSORS, NUMBERS = 64, 16
"""Of the weights in memory, the tensors that are compared, and the numbers of each."""


def ensure_same_inputs(
    accelerator: Accelerator, recipe: Recipe, active: Active, data: Prepared
) -> None:
    """Refuse ranks that have other recipes, plugins or data than others."""
    flat = flatten(recipe.model_dump(exclude_none=True) | {"plugins": {}})
    facts = {key: repr(value) for key, value in flat.items() if not key.startswith(PLACES)}
    facts |= {key: repr(value) for key, value in active.learned().items()}
    facts |= {f"the code of plugin {name}": active.source_digest(name) for name in active.plugins}
    facts["the version of plugsft"] = importlib.metadata.version("plugsft")
    facts["the training data"] = _tokens(data.tokens)
    if data.held_out is not None:
        facts["the evaluation data"] = _tokens(data.held_out)
    ensure_alike(accelerator, facts, CURE)


def model_facts(model: Any, load: Load) -> dict[str, str]:
    """Describe the model of this rank, before it is sharded: samples of its files and weights."""
    config = {name: repr(one) for name, one in model.config.to_dict().items()}
    files = sorted({*files_of(load.path, load.kwargs.get("revision")).values()})
    return {
        "the model's configuration": digest(config | {"_name_or_path": ""})[:8],
        "the model's files": digest({Path(file).name: _sampled(Path(file)) for file in files})[:8],
        "the model's weights": _weights(model),
    }


def plan_facts(plan: Plan) -> dict[str, str]:
    """Describe how this rank lays out the first step."""
    window = plan.window(1)
    layout = [[part.tolist() for part in rank] for rank in window.layout]
    return {
        "the number of steps": f"{plan.steps:,}",
        "the order of examples": digest({"layout": layout, "targets": window.total})[:8],
    }


def _tokens(tokens: Tokens) -> str:
    key = {"key": tokens.facts["key"], "index": tokens.facts["index"]}
    count = tokens.facts["tokens"]
    return f"{len(tokens):,} examples of {count:,} tokens ({digest(key)[:8]})"


def _sampled(file: Path) -> str:
    """Return a checksum of a file's size and of bytes all over it."""
    size, checksum = file.stat().st_size, xxhash.xxh3_64()
    with file.open("rb") as opened:
        for place in range(SAMPLES):
            opened.seek(size * place // SAMPLES)
            checksum.update(opened.read(SAMPLE))
    return f"{size} {checksum.hexdigest()}"


def _weights(model: Module) -> str:
    """Return a checksum of a sample of the weights that each rank has whole."""
    checksum = xxhash.xxh3_64()
    named = [
        (name, one)
        for name, one in model.named_parameters()
        # Under ZeRO-3 each rank has a stretch of its own.
        if not one.is_meta and not hasattr(one, "ds_id")
    ]
    for name, one in named[:: max(1, len(named) // TENSORS)]:
        sample = one.detach().flatten()[:NUMBERS].float().cpu().numpy()
        checksum.update(name.encode() + sample.tobytes())
    return checksum.hexdigest()[:8]
