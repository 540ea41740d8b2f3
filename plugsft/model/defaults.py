"""The core's own answers to the hooks of the model: from examples to losses."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from ..base.types import Batch, Ints, Score
from ..batches.labels import IGNORED, buffer, heard, label
from ..hooks import hookimpl
from ..recipe.tables import Train
from ..tokens.store import Tokens
from .load import Load


class ModelDefaults:
    """The model as it is, token cross-entropy, AdamW."""

    @hookimpl
    def optimize_model(self, load: Load) -> Module:
        """Load the model as it is."""
        return load.build()

    @hookimpl
    def annotate(self, tokens: Tokens) -> Tokens:
        """Add nothing."""
        return tokens

    @hookimpl
    def optimizer(self, model: Module, train: Train) -> Optimizer:
        """AdamW, with decoupled weight decay off for norms and biases."""
        decayed: list[Tensor] = []
        exempt: list[Tensor] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                # Under ZeRO-3 a rank's own part is flat; the true shape stands beside it.
                shape = getattr(parameter, "ds_shape", parameter.shape)
                (decayed if len(shape) > 1 else exempt).append(parameter)
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": train.weight_decay},
            {"params": exempt, "weight_decay": 0.0},
        ]
        return AdamW(
            [group for group in groups if group["params"]],
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            fused=True,
        )

    @hookimpl
    def collate(self, tokens: Tokens, examples: Ints, pad: int) -> Batch:
        """Pad on the right to the longest; masks follow from lengths, never from the pad token.

        Each sequence of an example is a row.
        """
        # A rank without examples still takes part in every exchange of gradients.
        lengths = tokens.sequences(examples)[0] if len(examples) else np.zeros(1, np.int64)
        longest = max(2, int(lengths.max()))
        shape = (len(lengths), longest)
        ids, labels, attention = (buffer(shape, torch.int64) for _ in range(3))
        places = np.arange(longest)
        inside = places < lengths[:, None]
        words, mask = tokens.gather(examples)
        ids.numpy().fill(pad)
        ids.numpy()[inside] = words
        labels.numpy().fill(IGNORED)
        labels.numpy()[inside] = label(words, mask)
        attention.numpy()[:] = places < np.maximum(lengths, 1)[:, None]
        return {"input_ids": ids, "attention_mask": attention, "labels": labels}

    @hookimpl
    def step(self, model: Module, batch: Batch, total: int, score: Score) -> Tensor:
        """Token cross-entropy."""
        return score(model=model, batch=batch, summed=True) / total

    @hookimpl
    def score(self, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Cross-entropy of the logits in float32."""
        # A cache has no use here, and with packed rows it lets documents see each other.
        logits = model(**heard(batch), use_cache=False).logits
        targets = batch["labels"][:, 1:].flatten()
        predictions = logits[:, :-1].flatten(0, 1).float()
        if summed:
            return cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="sum")
        losses = cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="none")
        return losses[targets != IGNORED]
