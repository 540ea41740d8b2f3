"""The losses of pairs of answers, and the proof that a shared prompt changes none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from plugsft import Prelude, RecipeError
from plugsft.kit.tokens import Tokens

if TYPE_CHECKING:
    from . import Dpo

PROBES = 2
"""Pairs on which a shared prompt is proved to change nothing."""


def compared(plugin: Dpo, deltas: Tensor) -> Tensor:
    """Return the losses of differences between chosen and rejected."""
    if plugin.loss == "hinge":
        return torch.relu(1 - plugin.beta * deltas)
    if plugin.loss == "ipo":
        return (deltas - 1 / (2 * plugin.beta)) ** 2
    wrong = plugin.label_smoothing
    right = logsigmoid(plugin.beta * deltas) * (1 - wrong)
    return -right - logsigmoid(-plugin.beta * deltas) * wrong


def summed(losses: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities of answers, two to a pair, from the losses of their targets."""
    sums = torch.segment_reduce(losses, "sum", lengths=targets, unsafe=True, initial=0)
    return -sums.view(-1, 2)


def prove_shared(model: Any, plain: Tokens, shared: Tokens, prelude: Prelude) -> str:
    """Compare the losses of some pairs with their prompt once and twice; say what it saves."""
    worst = 0.0
    training = model.training
    model.eval()
    try:
        for number in range(min(PROBES, len(plain))):
            chosen = np.array([number])
            one, other = (prelude.losses(model, some, chosen) for some in (plain, shared))
            worst = max(worst, float((one - other).abs().mean() / one.abs().mean()))
    finally:
        model.train(training)
    if not worst <= (1e-4 if prelude.exact else 5e-2):
        raise RecipeError(
            f"plugins.dpo: share_prompt: losses of a pair differ by {worst:.1e} where its prompt "
            "stands once; this model's attention cannot share it; remove share_prompt"
        )
    less = 1 - shared.lengths.sum() / plain.lengths.sum()
    return f"prompts shared: {less:.0%} fewer tokens (proved, {worst:.0e} off)"
