"""Examples that `check` knows from a sample."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..base.types import Ints
from ..batches.estimate import EstimatedColumns
from ..tokens.store import Tokens


@dataclass(frozen=True)
class Examples:
    """The examples of an epoch, or of a source, estimated from a sample."""

    lengths: Ints
    columns: EstimatedColumns

    @classmethod
    def unknown(cls, count: int) -> Self:
        """Return `count` examples, whose lengths are not known yet."""
        lengths = np.ones(count, np.int64)
        return cls(lengths, EstimatedColumns(lengths))

    @classmethod
    def like(cls, tokens: Tokens, count: int) -> Self:
        """Return examples like these, in their order and from the start again."""
        columns = {name: np.resize(of, count) for name, of in tokens.plan_columns().items()}
        lengths = np.resize(tokens.lengths, count)
        return cls(lengths, EstimatedColumns(lengths, columns))

    @classmethod
    def joined(cls, parts: Sequence[Self], weights: Sequence[float]) -> Self:
        """Return the examples of sources, each as often as its weight says."""
        counts = [
            round(weight * len(part.lengths)) for part, weight in zip(parts, weights, strict=True)
        ]
        names = {name for part in parts for name in part.columns}

        def join(arrays: Iterable[Ints]) -> Ints:
            return np.concatenate([np.resize(*pair) for pair in zip(arrays, counts, strict=True)])

        lengths = join(part.lengths for part in parts)
        columns = {name: join(part.columns[name] for part in parts) for name in names}
        return cls(lengths, EstimatedColumns(lengths, columns))
