"""What a model's configuration tells before its weights are read. Needs no model code."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from .errors import PlugsftError, RecipeError, TrainError, out_of_memory
from .recipe import Model, Recipe

TRUST = "trust_remote_code"
"""Every error of transformers about a model's own code says this."""


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
    """Refuse examples longer than the model was made for, and a loss that is not trained here."""
    scratch = recipe.model.scratch
    if scratch:
        context: int | None = scratch.context
    else:
        config = load_config(recipe.model)
        ensure_plain_loss(config, str(recipe.model.path))
        context = context_of(config)
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


def ensure_plain_loss(config: PretrainedConfig, path: str) -> None:
    """Refuse a configuration whose own loss has a term besides the cross-entropy of tokens.

    A load-balancing loss is a product of two means over the tokens of one forward pass, so its
    gradient depends on how a step is split into micro-batches and ranks.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        raise RecipeError(
            f"model.path: {path}/config.json has output_router_logits = true, which asks for a "
            "load-balancing loss of the router. Its value depends on which tokens share a "
            "micro-batch, so ranks and micro-batches would change what is learned; plugsft trains "
            "the cross-entropy of tokens only. Set output_router_logits = false in a copy of the "
            "model (router_aux_loss_coef alone does nothing)"
        )
    if weight := getattr(text, "z_loss_coefficient", 0):
        raise RecipeError(
            f"model.path: {path}/config.json has z_loss_coefficient = {weight:g}, a second loss "
            "on the logits; plugsft trains the cross-entropy of tokens only. Set "
            "z_loss_coefficient = 0 in a copy of the model"
        )


def context_of(config: PretrainedConfig) -> int | None:
    """Return the longest sequence a model was made for, where its configuration says."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def not_loaded(path: str, error: Exception) -> PlugsftError:
    """Say that a model cannot be loaded, and why."""
    if out_of_memory(error):
        return TrainError(f"model.path: out of memory while '{path}' was loaded")
    first = str(error).strip().partition("\n")[0]
    return RecipeError(
        f"model.path: no causal language model could be loaded from '{path}': "
        f"{type(error).__name__}: {first}{cure_of(error)}"
    )


def cure_of(error: Exception) -> str:
    """Return the cure for a model or tokenizer whose own code may not run."""
    if TRUST not in str(error):
        return ""
    return (
        ". Python code that comes with a model runs only if you say so: model.trust_remote_code = "
        "true in your recipe, or --trust-remote-code for chat and export"
    )
