"""The core's own answers to the hooks of the model: from examples to losses."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from .hooks import hookimpl
from .models import Load
from .recipe import Train
from .tokens import Tokens
from .types import Batch, Ints

IGNORED = -100


class ModelAnswers:
    """Padded batches, token cross-entropy, AdamW."""

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
        """Pad on the right to the longest; masks follow from lengths, never from the pad token."""
        # A rank without examples still takes part in every exchange of gradients.
        longest = int(tokens.lengths[examples].max()) if len(examples) else 2
        shape = (max(len(examples), 1), longest)
        ids = np.full(shape, pad, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        attention = np.zeros(shape, np.int64)
        attention[:, 0] = 1
        for place, number in enumerate(examples):
            mine, trained = tokens.example(int(number))
            ids[place, : len(mine)] = mine
            attention[place, : len(mine)] = 1
            labels[place, : len(mine)] = np.where(trained, mine, IGNORED)
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(attention),
            "labels": torch.from_numpy(labels),
        }

    @hookimpl
    def step(self, model: Module, batch: Batch, total: int) -> Tensor:
        """Token cross-entropy in float32."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        # A cache has no use here, and with packed rows it lets documents see each other.
        logits = model(**inputs, use_cache=False).logits
        targets = batch["labels"][:, 1:].flatten()
        predictions = logits[:, :-1].flatten(0, 1).float()
        return cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="sum") / total
