"""Losses and metrics of pairs of scores."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import logsigmoid

from plugsft import Batch, Ints
from plugsft.data_kit import Tokens
from plugsft.kit import model_inputs

from .pairs import MARGIN


def pair_columns(batch: Batch, tokens: Tokens, examples: Ints) -> Batch:
    """Return the place of each answer's last token in the batch, and the margins."""
    lengths, _ = tokens.sequences(examples)
    rows, width = batch["input_ids"].shape
    # A row has one answer, or all answers are in one packed row.
    starts = width * np.arange(len(lengths)) if rows > 1 else np.cumsum(lengths) - lengths
    margins = np.asarray(tokens.columns[MARGIN][examples], np.float32)
    last = torch.from_numpy(starts + lengths - 1)
    return {"_last": last, "_margins": torch.from_numpy(margins)}


def compare(model: Module, batch: Batch, center: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair, and its metrics."""
    logits = model(**model_inputs(batch), use_cache=False).logits
    # [pair, answer]; column 0 is the chosen answer.
    rewards = logits.flatten()[batch["_last"]].float().view(-1, 2)
    gaps = rewards[:, 0] - rewards[:, 1]
    losses = -logsigmoid(gaps - batch["_margins"])
    if center:
        losses = losses + center * rewards.sum(1) ** 2
    metrics = {"accuracy": (gaps > 0).float(), "margin": gaps, "mean_reward": rewards.mean(1)}
    return losses, metrics
