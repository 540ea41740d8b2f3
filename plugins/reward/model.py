"""A language model's layers under a head that scores answers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from plugsft.kit import meta_copy

from .supported import no_class, no_probabilities


def make_reward_model(causal: Any, seed: int) -> PreTrainedModel:
    """Return a sequence-classification model with the layers of a language model.

    Its weights may not be loaded yet.
    """
    config = causal.config
    model_class: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if model_class is None:
        raise no_class(config.model_type)
    config.num_labels = 1
    model: Any = meta_copy(causal, model_class)
    body = model.base_model_prefix
    layers, head = getattr(causal, body, None), getattr(model, "score", None)
    if type(layers) is not type(getattr(model, body)) or not isinstance(head, Linear):
        raise no_class(config.model_type)
    setattr(model, body, layers)
    model.config = config  # whose attention kernel the layers share
    head.weight = Parameter(initial_weight(head, config, seed).to(causal.dtype))
    score_every_token(model)
    return model  # type: ignore[no-any-return]


def initial_weight(head: Linear, config: Any, seed: int) -> Tensor:
    """Return random weights, the same on all ranks.

    They are rounded to bfloat16, so that they are the same in every dtype.
    """
    deviation = getattr(config.get_text_config(), "initializer_range", 0.02)
    generator = torch.Generator("cpu").manual_seed(seed)
    weight = torch.empty(head.weight.shape, device="cpu", dtype=torch.float32)
    return weight.normal_(0, deviation, generator=generator).bfloat16().float()


def score_every_token(model: Any) -> None:
    """Let the forward pass return the score at each token, since a packed row has many answers.

    The class of the model, which is saved and loaded, only returns that at a row's last token.
    """

    def forward(input_ids: Tensor, **inputs: Any) -> SequenceClassifierOutput:
        hidden = model.base_model(input_ids, **inputs).last_hidden_state
        return SequenceClassifierOutput(logits=model.score(hidden))

    def generate(*_: Any, **__: Any) -> NoReturn:
        raise no_probabilities()

    model.forward, model.generate, model.generation_config = forward, generate, None
