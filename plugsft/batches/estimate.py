"""Columns to lay out an estimate with, before a run has its tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base.types import Ints


class EstimatedColumns(dict[str, Any]):
    """Columns for an estimate, `lengths` among them; one without known values is all 0."""

    def __init__(self, lengths: Ints, columns: Mapping[str, Any] | None = None) -> None:
        shapes = {"lengths": lengths, "longest": lengths, "sequences": np.ones_like(lengths)}
        super().__init__({**shapes, **(columns or {})})
        self._count = len(lengths)

    def __missing__(self, name: str) -> Ints:
        return np.zeros(self._count, np.int64)
