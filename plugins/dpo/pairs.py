"""Pairs of answers as texts and tokens, and their shared prompts. Imports no torch."""

import copy

import numpy as np

from plugsft import DataError, RecipeError, RunModel
from plugsft.kit.tokens import Tokens, render_pairs

__all__ = ["count_pairs", "ensure_same_losses", "render_pairs"]

TESTED_PAIRS = 2
TOLERANCE = {True: 1e-4, False: 5e-2}
"""Allowed relative difference of losses, in float32 (True) or not."""


def count_pairs(tokens: Tokens, share_prompt: bool) -> Tokens:
    """Return tokens whose loss is divided by the number of pairs, not of targets."""
    if tokens.facts["pairs"] < len(tokens):
        raise DataError(
            "plugins.dpo: some examples are not pairs: they were prepared without [plugins.dpo]"
        )
    pairs = copy.copy(tokens.share_prompts() if share_prompt else tokens)
    pairs.denominators = np.ones(len(pairs), np.int64)
    return pairs


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
