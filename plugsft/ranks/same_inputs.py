"""Compares the inputs of all ranks before step 1: recipe, plugins, data, model and plan.

Two machines may find different rows, models or code under the same path. No loss would show it, so
each rank describes its inputs, and the ranks compare the descriptions.
"""

import importlib.metadata
from typing import Any

from ..base.checksums import digest
from ..model.load import ModelLoad
from ..model.same_base import sampled_digest
from ..recipe.parse import flatten
from ..recipe.tables import Recipe

SAME_INPUTS = (
    "All machines must have the same recipe, plugins, data and model; check that each path has the "
    "same files on all of them"
)
PLACES = ("output", "data.source", "data.tokens", "eval.source", "model.path", "model.tokenizer")
"""Paths that may differ between machines: their contents are compared instead."""


def compared_recipe(recipe: Recipe) -> dict[str, str]:
    """Describe the recipe, without plugins, and the version of plugsft."""
    keys = flatten(recipe.model_dump(exclude_none=True) | {"plugins": {}})
    compared = {key: repr(value) for key, value in keys.items() if not key.startswith(PLACES)}
    return compared | {"the version of plugsft": importlib.metadata.version("plugsft")}


def compared_model(model: Any, load: ModelLoad) -> dict[str, str]:
    """Describe the model of this rank by its configuration and samples of its files.

    Weights in memory follow from these, from the seed and from the plugins, compared before.
    """
    config = {name: repr(value) for name, value in model.config.to_dict().items()}
    return {
        "the model's configuration": digest(config | {"_name_or_path": ""})[:8],
        "the model's files": sampled_digest(load.path, load.kwargs.get("revision")),
    }
