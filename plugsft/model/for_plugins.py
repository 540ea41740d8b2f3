"""What plugins ask of models, before a run and in it; the loop does not use it."""

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from transformers import GradientCheckpointingLayer, LlamaConfig

from ..base.errors import PlugsftError, RecipeError, did_you_mean
from ..recipe.tables import Recipe
from .config import load_config, load_error, local_folder
from .kept_tensors import ensure_complete, kept_tensors
from .published import build
from .weight_files import WeightFiles, find_weight_files


def decoder_layers(model: Any, that: str) -> list[Any]:
    """Return a model's layers; `that` ends the error if none: their use and the cure."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise RecipeError(f"a model of type '{model.config.model_type}' has no layers that {that}")
    return layers


def meta_model(recipe: Recipe) -> Any:
    """Return the recipe's model without weights, or None if it cannot be built."""
    # `ensure_tensors_fit` says why it cannot.
    with suppress(Exception):
        return build_empty(recipe)
    return None


def build_empty(recipe: Recipe, published: bool = False) -> Any:
    """Build the recipe's model without weights.

    `published`: of its published class, also where its text alone is trained.
    """
    model = recipe.model
    if model.scratch:
        config: Any = LlamaConfig(num_hidden_layers=model.scratch.layers, tie_word_embeddings=True)
    else:
        config = load_config(model)
    text_only = model.text_only or recipe.provides("reward_model") is not None
    with torch.device("meta"):
        trust = model.trust_remote_code
        empty = build(config, text_only and not published, trust_remote_code=trust)
        empty.tie_weights()
    return empty


def ensure_tensors_fit(recipe: Recipe) -> None:
    """Refuse a model that cannot be built, and files of other tensors: reads their headers."""
    folder = local_folder(recipe.model)
    try:
        model = build_empty(recipe)
        files = find_weight_files(str(folder), None) if folder else []
        # A download may be incomplete.
        if files and all(map(os.path.isfile, files)):
            kept_tensors(build_empty(recipe, published=True), str(folder), None)
            ensure_complete(model, WeightFiles(model, files), str(folder))
    except PlugsftError:
        raise
    except Exception as error:  # transformers passes on all errors of its classes
        raise load_error(str(recipe.model.path), error) from error


def find_modules(
    what: str, endings: Iterable[str], names: list[str], linear: list[str]
) -> list[str]:
    """Return the names that end with `endings`, at a dot; `what` begins the error if none does."""
    chosen: dict[str, None] = {}
    for ending in endings:
        found = [name for name in names if f".{name}".endswith(f".{ending}")]
        if not found:
            known, listed = ([*dict.fromkeys(map(last_part, each))] for each in (names, linear))
            hint = did_you_mean(last_part(ending), known) or ";"
            raise RecipeError(
                f"{what} is named '{ending}'{hint} linear layers: {', '.join(listed)}"
            )
        chosen |= dict.fromkeys(found)
    return [*chosen]


def last_part(name: str) -> str:
    """Return the last part of a module's name."""
    return name.rpartition(".")[2]
