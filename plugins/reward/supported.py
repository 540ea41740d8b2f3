"""Recipes that a reward model cannot be trained with."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

# By its own module: `plugsft prepare` has no torch, without which transformers names a dummy.
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from plugsft import Recipe, RecipeError

ENDING = "ForSequenceClassification"


def ensure_scorable(recipe: Recipe) -> None:
    """Refuse samples of answers, and models that cannot become a reward model."""
    if samples := recipe.provides("sampled_answers"):
        raise RecipeError(f"a reward model cannot generate answers; remove {samples.table}")
    if recipe.model.path:
        _ensure_base_model(recipe)


def _ensure_base_model(recipe: Recipe) -> None:
    """Refuse a base that is a reward model already, or that transformers has no such class for."""
    model = recipe.model
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    options |= {"revision": model.revision} if model.revision else {}
    try:
        config: Any = AutoConfig.from_pretrained(str(model.path), **options)
    except Exception:  # the core reports a configuration that cannot be read
        return
    if any(name.endswith(ENDING) for name in config.architectures or []):
        raise RecipeError(
            f"model.path: {model.path} is a {config.architectures[0]}, whose head would be "
            "replaced; name the language model that it was made from"
        )
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise no_class(config.model_type)


def no_class(family: str) -> RecipeError:
    """Return the error for a family whose language models cannot become reward models."""
    return RecipeError(
        f"model: a language model of type '{family}' cannot become a reward model: transformers "
        f"has no class {ENDING} around the same layers; use another model"
    )


def no_probabilities() -> RecipeError:
    """Return the error for a use of the language model's head, which is gone."""
    return RecipeError(
        "plugins.reward: a reward model scores answers; it has no probabilities of tokens, and "
        "cannot generate. Remove the plugin that asks for them"
    )
