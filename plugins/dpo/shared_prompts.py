"""Proof that a pair's losses are the same if its answers share the prompt. Imports no torch."""

import numpy as np

from plugsft import RecipeError, RunModel
from plugsft.data_kit import Tokens

TESTED_PAIRS = 2
TOLERANCE = {True: 1e-4, False: 5e-2}
"""Allowed relative difference of losses, in float32 (True) or not."""


def ensure_same_losses(model: RunModel, plain: Tokens, shared: Tokens) -> str:
    """Compare losses of pairs with and without a shared prompt; return what sharing saves."""
    largest = 0.0
    for number in range(min(TESTED_PAIRS, len(plain))):
        pair = np.array([number])
        expected, losses = (model.score(tokens, pair) for tokens in (plain, shared))
        difference = (expected - losses).abs().mean() / expected.abs().mean()
        largest = max(largest, float(difference))
    if not largest <= TOLERANCE[model.exact]:
        raise RecipeError(
            f"plugins.dpo: share_prompt: losses of a pair differ by {largest:.1e} with a shared "
            "prompt; this model's attention does not support it; remove share_prompt"
        )
    saved = 1 - shared.lengths.sum() / plain.lengths.sum()
    return f"prompts shared: {saved:.0%} fewer tokens (proved, {largest:.0e} off)"
