"""Checks layouts of `plan_batches`: each rank has its part, and each example comes once."""

from __future__ import annotations

from threading import Lock

import numpy as np

from ..base.errors import PluginError
from ..base.types import Ints, Layout


class Coverage:
    """The examples of an epoch that no step has laid out yet."""

    def __init__(self, order: Ints, examples: int, steps: int, planner: str) -> None:
        self._left = np.bincount(order, minlength=examples).astype(np.int32)
        self._steps, self._planner, self._seen = steps, planner, set[int]()
        self._lock = Lock()  # steps may be planned in several threads

    def add(self, number: int, layout: Layout) -> None:
        """Refuse a step that repeats examples, and a last one that leaves examples out."""
        examples = np.concatenate([examples for rank in layout for examples in rank])
        with self._lock:
            if number in self._seen:
                return
            self._seen.add(number)
            if examples.size and not 0 <= examples.min() <= examples.max() < len(self._left):
                raise PluginError(
                    f"{self._planner} laid out an example that does not exist in step {number + 1} "
                    f"of the epoch; there are {len(self._left):,}, from 0"
                )
            np.subtract.at(self._left, examples, 1)
            if (repeated := examples[self._left[examples] < 0]).size:
                raise PluginError(
                    f"{self._planner} laid out example {repeated[0]:,} more often than the epoch's "
                    "order has it; it must lay out each example once"
                )
            if len(self._seen) == self._steps and (lost := np.flatnonzero(self._left)).size:
                raise PluginError(
                    f"{self._planner} left out {lost.size:,} examples of the epoch, such as "
                    f"example {lost[0]:,}; it must lay out each example once. Leave examples out "
                    "in 'order_examples'"
                )


def ensure_layout(layout: Layout, ranks: int, planner: str) -> None:
    """Refuse a layout for other ranks, or with other micro-batches on some rank."""
    counts = [len(micro_batches) for micro_batches in layout]
    if len(counts) != ranks or len({*counts}) != 1 or not counts[0]:
        raise PluginError(
            f"{planner} gave micro-batches per rank: {counts}; it must give each of "
            f"{ranks} ranks the same number, and at least one"
        )
    for micro_batch in (micro_batch for rank in layout for micro_batch in rank):
        if not isinstance(micro_batch, np.ndarray) or micro_batch.dtype.kind not in "iu":
            raise PluginError(
                f"{planner} gave a micro-batch that is no numpy array of whole numbers"
            )
