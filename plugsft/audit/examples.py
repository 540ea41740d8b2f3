"""Examples that `check` knows from a sample."""

import numpy as np

from ..data.sample import EstimatedColumns
from ..tokens.store import Tokens


def like(tokens: Tokens, count: int) -> EstimatedColumns:
    """Return examples like these, in their order and from the start again."""
    columns = {name: np.resize(of, count) for name, of in tokens.plan_columns().items()}
    return EstimatedColumns(np.resize(tokens.lengths, count), columns)


def join(parts: list[EstimatedColumns], weights: list[float]) -> EstimatedColumns:
    """Return the examples of all sources, each as often as its weight says."""
    counts = [
        round(weight * len(part["lengths"])) for part, weight in zip(parts, weights, strict=True)
    ]
    joined = {
        name: np.concatenate(
            [np.resize(part[name], count) for part, count in zip(parts, counts, strict=True)]
        )
        for name in {name for part in parts for name in part}
    }
    return EstimatedColumns(joined["lengths"], joined)
