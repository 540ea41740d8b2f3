"""The recipe's model without weights, for plugins that look for modules before a run."""

from contextlib import suppress
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from ..recipe.tables import Recipe


def meta_model(recipe: Recipe) -> Any:
    """Return the recipe's model without weights, or None if it cannot be built."""
    model = recipe.model
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    # The core reports a model that cannot be built.
    with suppress(Exception), torch.device("meta"):
        if model.scratch:
            config = LlamaConfig(num_hidden_layers=model.scratch.layers, tie_word_embeddings=True)
        else:
            revision = {"revision": model.revision} if model.revision else {}
            config = AutoConfig.from_pretrained(str(model.path), **options, **revision)
        auto_class: Any = AutoModelForCausalLM
        empty = auto_class.from_config(config, **options)
        empty.tie_weights()
        return empty
    return None
