"""Losses and metrics of pairs of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plugsft import PluginError

from .losses import LOSSES, options_of

if TYPE_CHECKING:
    from . import Dpo

INITIAL_TOLERANCE = {True: 1e-3, False: 5e-2}
"""Allowed relative error of the first loss, in float32 (True) or not."""


def compare(
    plugin: Dpo, log_probs: Tensor, gains: Tensor, lengths: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair, without that of its tokens, and its metrics.

    Arguments are [pair, answer]; column 0 is the chosen answer. `gains`: log-probabilities, less
    those of the reference if there is one.
    """
    loss, options = LOSSES[plugin.loss], options_of(plugin)
    scores = gains / lengths if loss.per_token else gains
    # As in TRL: with a reference of whole answers, else of what the loss compares.
    rewards = options.beta * (gains if loss.reference else scores)
    metrics = {
        "accuracy": (rewards[:, 0] > rewards[:, 1]).float(),
        "margin": rewards[:, 0] - rewards[:, 1],
    }
    for column, side in enumerate(("chosen", "rejected")):
        metrics[f"reward_{side}"] = rewards[:, column]
        metrics[f"logp_{side}"] = log_probs[:, column]
    return loss.formula(scores, options), metrics


def ensure_initial_loss(plugin: Dpo, losses: Tensor) -> None:
    """Check the first loss, which is known if the reference is the initial model."""
    loss = LOSSES[plugin.loss]
    if not loss.reference or plugin.reference or not len(losses):
        return
    # The initial model gives every pair the scores 0.
    expected = float(loss.formula(torch.zeros(1, 2), options_of(plugin)))
    actual = float(losses.detach().mean())
    if not abs(actual - expected) <= INITIAL_TOLERANCE[plugin.model.exact] * expected:
        raise PluginError(
            f"plugins.dpo: the first loss is {actual:.6g}, but should be {expected:.6g}, since "
            "model and reference are the same before step 1. Most likely the model is random (a "
            "dropout or a router of its own code), or the stored log-probabilities are of other "
            "weights or another kernel (remove the folder that the plugin that stores them names)"
        )
