"""Losses and metrics of pairs of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from plugsft import Batch, Ints, PluginError
from plugsft.kit import Tokens

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
        self._plugin, self._exact = plugin, exact
        self._sums: dict[str, Tensor] = {}

    def losses(self, pairs: Pairs, training: bool) -> Tensor:
        """Return the loss of each pair times its weight, and add up its metrics."""
        plugin = self._plugin
        losses, metrics = preference_losses(plugin, pairs), pair_metrics(plugin.beta, pairs)
        if self.is_untrained and training:
            self.is_untrained = False
            ensure_initial_loss(plugin, losses.detach(), self._exact)
        if plugin.nll:
            metrics["nll"] = mean_nll(pairs)
            losses = losses + plugin.nll * metrics["nll"]
        for name, values in metrics.items():
            self._sums[name] = self._sums.get(name, 0) + (pairs.weights * values.detach()).sum()
        return pairs.weights * losses

    def take_sums(self) -> dict[str, Tensor]:
        """Return a sum for every metric, and forget it; a rank without pairs has none."""
        sums, self._sums = self._sums, {}
        names = (*METRICS, "nll") if self._plugin.nll else METRICS
        return {name: sums.get(name, torch.zeros(())) for name in names}


def preference_losses(plugin: Dpo, pairs: Pairs) -> Tensor:
    """Return the loss of each pair."""
    scores = pairs.log_probs - pairs.reference
    if plugin.loss in ("length_normalized", "ipo"):
        scores = scores / pairs.lengths
    return losses_of_margins(plugin, scores[:, 0] - scores[:, 1])


def losses_of_margins(plugin: Dpo, margins: Tensor) -> Tensor:
    """Return the losses of differences between chosen and rejected answers."""
    if plugin.loss == "hinge":
        return torch.relu(1 - plugin.beta * margins)
    if plugin.loss == "ipo":
        return (margins - 1 / (2 * plugin.beta)) ** 2
    smoothing = plugin.label_smoothing
    preferred = logsigmoid(plugin.beta * margins) * (1 - smoothing)
    return -preferred - logsigmoid(-plugin.beta * margins) * smoothing


def mean_nll(pairs: Pairs) -> Tensor:
    """Return the mean loss per token of each chosen answer."""
    return -pairs.log_probs[:, 0] / pairs.lengths[:, 0]


def pair_metrics(beta: float, pairs: Pairs) -> dict[str, Tensor]:
    """Return the metrics of each pair."""
    # Of whole answers for every loss, as in TRL.
    rewards = beta * (pairs.log_probs - pairs.reference).detach()
    return {
        "accuracy": (rewards[:, 0] > rewards[:, 1]).float(),
        "margin": rewards[:, 0] - rewards[:, 1],
        **{f"reward_{side}": rewards[:, column] for column, side in enumerate(SIDES)},
        **{f"logp_{side}": pairs.log_probs[:, column] for column, side in enumerate(SIDES)},
    }


def ensure_initial_loss(plugin: Dpo, losses: Tensor, exact: bool) -> None:
    """Check the first loss, which is known if the reference is the initial model."""
    if plugin.reference or not len(losses):
        return
    expected, actual = float(losses_of_margins(plugin, torch.zeros(()))), float(losses.mean())
    if not abs(actual - expected) <= INITIAL_TOLERANCE[exact] * expected:
        raise PluginError(
            f"plugins.dpo: the first loss is {actual:.6g}, but should be {expected:.6g}, since "
            "model and reference are the same before step 1. Most likely the model is random (a "
            "dropout or a router of its own code), or the stored log-probabilities are of other "
            "weights or another kernel (remove the folder that the plugin that stores them names)"
        )
