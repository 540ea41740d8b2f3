"""Objective and metrics of pairs of scores."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import logsigmoid

from plugsft import Batch, Ints
from plugsft.kit import Tokens, model_inputs

from .pairs import MARGIN

METRICS = ("accuracy", "margin", "mean_reward")


def pair_columns(batch: Batch, tokens: Tokens, examples: Ints) -> Batch:
    """Return the place of each answer's last token in the batch, the margins and the weights."""
    lengths, _ = tokens.sequences(examples)
    rows, width = batch["input_ids"].shape
    # A row has one answer, or all answers are in one packed row.
    starts = width * np.arange(len(lengths)) if rows > 1 else np.cumsum(lengths) - lengths
    margins = np.asarray(tokens.columns[MARGIN][examples], np.float32)
    return {
        "_last": torch.from_numpy(starts + lengths - 1),
        "_margins": torch.from_numpy(margins),
        "_pair_weights": torch.from_numpy(tokens.weights(examples)),
    }


class Objective:
    """The losses of pairs, and the sums of their metrics."""

    def __init__(self, center: float) -> None:
        self._center = center
        self._sums: dict[str, Tensor] = {}

    def losses(self, model: Module, batch: Batch) -> Tensor:
        """Return the loss of each pair times its weight, and add up its metrics."""
        logits = model(**model_inputs(batch), use_cache=False).logits
        # [pair, answer]; column 0 is the chosen answer.
        rewards = logits.flatten()[batch["_last"]].float().view(-1, 2)
        gaps, weights = rewards[:, 0] - rewards[:, 1], batch["_pair_weights"]
        losses = -logsigmoid(gaps - batch["_margins"])
        if self._center:
            losses = losses + self._center * rewards.sum(1) ** 2
        metrics = {
            "accuracy": (gaps > 0).float(),
            "margin": gaps.detach(),
            "mean_reward": rewards.detach().mean(1),
        }
        for name, values in metrics.items():
            self._sums[name] = self._sums.get(name, 0) + (weights * values).sum()
        weighted: Tensor = weights * losses
        return weighted

    def take_sums(self) -> dict[str, Tensor]:
        """Return a sum for every metric, and forget it; a rank without pairs has none."""
        sums, self._sums = self._sums, {}
        return {name: sums.get(name, torch.zeros(())) for name in METRICS}
