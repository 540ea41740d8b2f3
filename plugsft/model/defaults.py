"""The core's answers to the hooks of the model: from examples to losses."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from ..base.types import Batch, Ints, TokenNll
from ..batches.labels import IGNORED, buffer, make_labels, model_inputs, target_places
from ..hooks import hookimpl
from ..recipe.tables import Train
from ..tokens.store import Tokens
from .load import ModelLoad
from .schedule import ScheduleDefaults
from .tensor_shards import whole_shape


class ModelDefaults(ScheduleDefaults):
    """The unchanged model, token cross-entropy, AdamW."""

    @hookimpl
    def optimize_model(self, load: ModelLoad) -> Module:
        """Load the model unchanged."""
        return load.load_model()

    @hookimpl
    def add_columns(self, tokens: Tokens) -> Tokens:
        """Add no columns."""
        return tokens

    @hookimpl
    def optimizer(self, model: Module, train: Train) -> Optimizer:
        """Create AdamW, without weight decay for norms and biases."""
        return AdamW(
            decay_groups(model, train.weight_decay),
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            fused=True,
        )

    @hookimpl
    def collate(self, tokens: Tokens, examples: Ints, pad: int) -> Batch:
        """Pad right to the longest sequence; each sequence is a row of the batch.

        Masks come from lengths, never from the pad token.
        """
        # A rank without examples gets one padded row: it must join every all-reduce.
        lengths = tokens.sequences(examples)[0] if len(examples) else np.zeros(1, np.int64)
        longest = max(2, int(lengths.max()))
        shape = (len(lengths), longest)
        ids, labels, attention = (buffer(shape, torch.int64) for _ in range(3))
        positions = np.arange(longest)
        inside = positions < lengths[:, None]
        token_ids, mask = tokens.gather(examples)
        ids.numpy().fill(pad)
        ids.numpy()[inside] = token_ids
        labels.numpy().fill(IGNORED)
        labels.numpy()[inside] = make_labels(token_ids, mask)
        attention.numpy()[:] = positions < np.maximum(lengths, 1)[:, None]
        return {"input_ids": ids, "attention_mask": attention, "labels": labels}

    @hookimpl
    def step(self, model: Module, batch: Batch, denominator: float, token_nll: TokenNll) -> Tensor:
        """Compute the token cross-entropy: the sum of weight x nll of all targets / denominator.

        The denominator is the sum of the weights of all targets of the global batch. So a row of
        weight 2 counts as if it were in the global batch twice.
        """
        weights: Tensor | None = batch.get("_target_weights")
        if weights is None:  # all are 1
            return token_nll(model=model, batch=batch, summed=True) / denominator
        loss: Tensor = (weights * token_nll(model=model, batch=batch, summed=False)).sum()
        return loss / denominator

    @hookimpl
    def use_weights(self, work: Callable[[], Any]) -> Any:
        """Work with the trained weights."""
        return work()

    @hookimpl
    def token_nll(self, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Compute the cross-entropy of float32 logits."""
        # With packed rows, a key-value cache would let documents attend to each other.
        logits = model(**model_inputs(batch), use_cache=False).logits
        targets = batch["labels"][:, 1:].flatten()
        predictions = logits[:, :-1].flatten(0, 1).float()
        kind = "sum" if summed else "none"
        losses = cross_entropy(predictions, targets, ignore_index=IGNORED, reduction=kind)
        if summed:
            return losses
        places = target_places(batch)
        # Predictions leave out the last place of each row: before row r, r places are missing.
        rows = places // batch["labels"].shape[1]
        return losses[places - rows]


def decay_groups(model: Module, weight_decay: float | None) -> list[dict[str, Any]]:
    """Return the parameter groups of all trained weights; norms and biases are not decayed.

    None: the optimizer has no weight decay.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = [weight for weight in trained if len(whole_shape(weight)) > 1]
    others = [weight for weight in trained if len(whole_shape(weight)) <= 1]
    if weight_decay is None:
        return [{"params": matrices + others}]
    decays = ((matrices, weight_decay), (others, 0.0))
    return [{"params": weights, "weight_decay": decay} for weights, decay in decays if weights]
