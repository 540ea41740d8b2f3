"""Tokens whose examples are parts of others: cut ones, and pairs with one prompt."""

from __future__ import annotations

import copy

import numpy as np

from ..base.types import Ints
from .store import Tokens


def cut(
    tokens: Tokens, numbers: Ints, skips: Ints, lengths: Ints, targets: Ints | None = None
) -> Tokens:
    """Return tokens whose examples are spans of these: number, tokens to skip, length.

    `targets` are their numbers of targets. Default: count them.
    """
    assert tokens._spans is None, "these tokens are cut already"
    assert not tokens.facts["pairs"], "pairs cannot be cut"
    result = copy.copy(tokens)
    result._spans = numbers[:, None], skips[:, None], lengths[:, None]
    result.lengths = result._first_lengths = lengths
    result.rows, result._seen = tokens.rows[numbers], tokens._seen[numbers]
    result.targets = tokens.targets[numbers].copy() if targets is None else targets
    shorter = lengths < tokens.lengths[numbers]
    for number in np.flatnonzero(shorter).tolist() if targets is None else []:
        _, mask = result.example(number)
        # Nothing predicts the first token of a cut example.
        result.targets[number] = np.count_nonzero(mask[1:])
    result.denominators = result.targets
    result.columns = {name: values[numbers] for name, values in tokens.columns.items()}
    counts = np.diff(np.searchsorted(numbers, tokens._source_offsets()))
    sources = [
        {**source, "examples": int(count)}
        for source, count in zip(tokens.facts["sources"], counts, strict=True)
    ]
    result.facts = {**tokens.facts, "examples": len(numbers), "sources": sources}
    return result


def share_prompts(tokens: Tokens) -> Tokens:
    """Return pairs that store their common prompt once, in the first sequence.

    Its last token stays in both: it predicts the first target of each answer.
    """
    result, first = copy.copy(tokens), tokens._first_lengths
    result._seen = np.maximum(tokens._prefixes - 1, 0)
    result.lengths = tokens.lengths - result._seen
    numbers = np.arange(len(tokens))
    result._spans = (
        np.stack([numbers, numbers], 1),
        np.stack([np.zeros_like(first), first + result._seen], 1),
        np.stack([first, result.lengths - first], 1),
    )
    return result
