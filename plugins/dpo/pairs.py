"""Tokens of pairs of answers. Imports no torch."""

import copy

import numpy as np

from plugsft import DataError
from plugsft.kit import Tokens


def count_pairs(tokens: Tokens, share_prompt: bool) -> Tokens:
    """Return tokens whose loss is divided by the number of pairs, not of targets."""
    if tokens.facts["pairs"] < len(tokens):
        raise DataError(
            "plugins.dpo: some examples are not pairs: they were prepared without [plugins.dpo]"
        )
    pairs = copy.copy(tokens.share_prompts() if share_prompt else tokens)
    pairs.denominators = np.ones(len(pairs), np.int64)
    return pairs
