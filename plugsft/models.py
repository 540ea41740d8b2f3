"""The model: loaded from a folder or the hub, or made new from a few numbers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from .context import not_loaded
from .recipe import Model, Scratch


@dataclass
class Load:
    """How the model will be loaded; plugins edit it before it is."""

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `AutoModelForCausalLM.from_pretrained`."""

    def build(self) -> PreTrainedModel:
        """Load it."""
        try:
            model = AutoModelForCausalLM.from_pretrained(self.path, **self.kwargs)
        except Exception as error:  # transformers raises whatever its readers and the hub raise
            raise not_loaded(self.path, error) from error
        return model


def load_of(model: Model, scratch: Path) -> Load:
    """Return how a recipe's model is loaded, before any plugin."""
    kwargs: dict[str, Any] = {
        "dtype": getattr(torch, model.dtype),
        "trust_remote_code": model.trust_remote_code,
    }
    if model.revision:
        kwargs["revision"] = model.revision
    return Load(model.path or str(scratch), kwargs)


def make_model(scratch: Scratch, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Make a small decoder with random weights that follow from the seed."""
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=scratch.hidden,
        intermediate_size=scratch.mlp or 4 * scratch.hidden,
        num_hidden_layers=scratch.layers,
        num_attention_heads=scratch.heads,
        num_key_value_heads=scratch.kv_heads or scratch.heads,
        max_position_embeddings=scratch.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
