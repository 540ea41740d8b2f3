"""Tokens whose examples are parts of others: cut ones, and pairs with one prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.types import Ints
from .store import Tokens


class View(Tokens):
    """Tokens whose examples are spans of others; each column has [examples, spans]."""

    def __init__(self, tokens: Tokens, numbers: Ints, skips: Ints, lengths: Ints) -> None:
        vars(self).update(vars(tokens))
        self._columns = numbers, skips, lengths

    def gather(self, examples: Ints) -> Any:
        """Read the spans of examples."""
        return self._read(*(column[examples].ravel() for column in self._columns))


def cut(
    tokens: Tokens, numbers: Ints, skips: Ints, lengths: Ints, targets: Ints | None = None
) -> Tokens:
    """Make tokens whose examples are spans of these: number, tokens to skip, length.

    `targets` are their numbers of targets. Default: count them.
    """
    assert not isinstance(tokens, View), "these tokens are cut already"
    assert not tokens.facts["pairs"], "pairs cannot be cut"
    result = View(tokens, numbers, skips, lengths)
    result.lengths, result.rows = lengths, tokens.rows[numbers]
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
    """Make pairs that store their common prompt once, in the first sequence.

    Its last token stays in both: it predicts the first target of each answer.
    """
    first, shared = tokens._first_lengths, np.maximum(tokens._shared_prefixes - 1, 0)
    lengths, numbers = tokens.lengths - shared, np.arange(len(tokens))
    result = View(
        tokens,
        np.stack([numbers, numbers], 1),
        np.stack([np.zeros_like(first), first + shared], 1),
        np.stack([first, lengths - first], 1),
    )
    result.lengths, result._shared_tokens = lengths, shared
    return result
