"""What a model's configuration tells before its weights are read. Needs no model code."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from .errors import RecipeError
from .recipe import Model, Recipe


def load_config(model: Model) -> PretrainedConfig:
    """Read the configuration of a model, without its weights."""
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if model.revision:
        options["revision"] = model.revision
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(model.path), **options)
    except Exception as error:  # transformers raises whatever its readers and the hub raise
        raise not_loaded(str(model.path), error) from error
    return config


def check_context(recipe: Recipe) -> None:
    """Refuse examples longer than the model was made for."""
    scratch = recipe.model.scratch
    context = scratch.context if scratch else context_of(load_config(recipe.model))
    if context is not None and recipe.data.max_length > context:
        raise RecipeError(
            f"data.max_length: given {recipe.data.max_length}, but the model reads {context} "
            f"tokens at most; set data.max_length = {context}"
            + (", or raise model.scratch.context" if scratch else "")
        )


def check_ids(recipe: Recipe, largest: int) -> None:
    """Refuse token ids for which the model has no embedding, where its configuration tells."""
    if recipe.model.scratch:
        return
    size = getattr(load_config(recipe.model).get_text_config(), "vocab_size", None)
    if isinstance(size, int) and largest >= size:
        raise RecipeError(
            f"model: the tokenizer gives the token id {largest}, but the model knows only {size} "
            "ids; use the model's own tokenizer (model.tokenizer), or a model whose embeddings "
            "were resized for this one"
        )


def context_of(config: PretrainedConfig) -> int | None:
    """Return the longest sequence a model was made for, where its configuration says."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def not_loaded(path: str, error: Exception) -> RecipeError:
    """Say that a model cannot be loaded, and why."""
    first = str(error).strip().partition("\n")[0]
    return RecipeError(
        f"model.path: no causal language model could be loaded from '{path}': "
        f"{type(error).__name__}: {first}"
    )
