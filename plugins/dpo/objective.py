"""Objective and metrics of pairs of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plugsft import Batch, Ints, PluginError
from plugsft.kit import Tokens

from .losses import LOSSES, Loss, options_of
from .scorer import Pairs

if TYPE_CHECKING:
    from . import Dpo

SIDES = ("chosen", "rejected")
METRICS = (
    "accuracy",
    "margin",
    *(f"{name}_{side}" for name in ("reward", "logp") for side in SIDES),
)
INITIAL_TOLERANCE = {True: 1e-3, False: 5e-2}
"""Allowed relative error of the first loss, in float32 (True) or not."""


def pair_columns(tokens: Tokens, examples: Ints) -> Batch:
    """Return the targets of each answer, the weights, and the reference's scores if known."""
    columns = {
        "_targets": torch.from_numpy(tokens.sequence_targets(examples)),
        "_pair_weights": torch.from_numpy(tokens.weights(examples)),
    }
    if "reference" in tokens.columns:
        columns["_reference"] = torch.from_numpy(tokens.columns["reference"][examples])
    return columns


class Objective:
    """The losses of pairs, and the sums of their metrics."""

    def __init__(self, plugin: Dpo, exact: bool) -> None:
        self.is_untrained = False
        """Whether the first loss is still to be checked."""
        self._loss, self._options, self._exact = LOSSES[plugin.loss], options_of(plugin), exact
        # Only the initial model gives every pair the scores 0.
        self._initial_loss_known = self._loss.reference and not plugin.reference
        self._sums: dict[str, Tensor] = {}

    def losses(self, pairs: Pairs, training: bool) -> Tensor:
        """Return the loss of each pair times its weight, and add up its metrics."""
        losses = self._loss.formula(scores_of(self._loss, pairs), self._options)
        metrics = pair_metrics(self._loss, self._options.beta, pairs)
        if self.is_untrained and training:
            self.is_untrained = False
            if self._initial_loss_known and len(losses):
                expected = self._loss.formula(torch.zeros(1, 2), self._options)
                ensure_initial_loss(float(losses.detach().mean()), float(expected), self._exact)
        if self._options.nll:
            metrics["nll"] = mean_nll(pairs)
            losses = losses + self._options.nll * metrics["nll"]
        for name, values in metrics.items():
            self._sums[name] = self._sums.get(name, 0) + (pairs.weights * values.detach()).sum()
        return pairs.weights * losses

    def take_sums(self) -> dict[str, Tensor]:
        """Return a sum for every metric, and forget it; a rank without pairs has none."""
        sums, self._sums = self._sums, {}
        names = (*METRICS, "nll") if self._options.nll else METRICS
        return {name: sums.get(name, torch.zeros(())) for name in names}


def scores_of(loss: Loss, pairs: Pairs) -> Tensor:
    """Return what a loss compares, [pair, answer]."""
    scores = gains(pairs)
    return scores / pairs.lengths if loss.per_token else scores


def gains(pairs: Pairs) -> Tensor:
    """Return log-probabilities of answers, less those of the reference if there is one."""
    return pairs.log_probs if pairs.reference is None else pairs.log_probs - pairs.reference


def mean_nll(pairs: Pairs) -> Tensor:
    """Return the mean loss per token of each chosen answer."""
    return -pairs.log_probs[:, 0] / pairs.lengths[:, 0]


def pair_metrics(loss: Loss, beta: float, pairs: Pairs) -> dict[str, Tensor]:
    """Return the metrics of each pair."""
    # As in TRL: with a reference of whole answers, else of what the loss compares.
    scores = gains(pairs) if loss.reference else scores_of(loss, pairs)
    rewards = beta * scores.detach()
    return {
        "accuracy": (rewards[:, 0] > rewards[:, 1]).float(),
        "margin": rewards[:, 0] - rewards[:, 1],
        **{f"reward_{side}": rewards[:, column] for column, side in enumerate(SIDES)},
        **{f"logp_{side}": pairs.log_probs[:, column] for column, side in enumerate(SIDES)},
    }


def ensure_initial_loss(actual: float, expected: float, exact: bool) -> None:
    """Check the first loss, which is known if the reference is the initial model."""
    if not abs(actual - expected) <= INITIAL_TOLERANCE[exact] * expected:
        raise PluginError(
            f"plugins.dpo: the first loss is {actual:.6g}, but should be {expected:.6g}, since "
            "model and reference are the same before step 1. Most likely the model is random (a "
            "dropout or a router of its own code), or the stored log-probabilities are of other "
            "weights or another kernel (remove the folder that the plugin that stores them names)"
        )
