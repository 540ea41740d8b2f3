"""Steps whose examples are sorted by length, and their padding."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from plugsft import Ints, Layouts

if TYPE_CHECKING:
    from . import LengthGroup

COUNTING = Lock()
"""Steps of training and evaluation may be laid out in different threads."""


class SortedSteps(Layouts):
    """Steps whose examples are sorted by length on demand; each sequence is padded as a row."""

    def __init__(
        self, layouts: Layouts, lengths: Ints, columns: Mapping[str, Ints], plugin: LengthGroup
    ) -> None:
        self._layouts, self._lengths, self._plugin = layouts, lengths, plugin
        self._widths, self._rows = columns["longest"], columns["sequences"]
        self._counted: set[int] = set()
        """Steps that the plugin has counted: a step may be laid out twice."""

    def __len__(self) -> int:
        return len(self._layouts)

    def lay_out(self, number: int) -> list[list[Ints]]:
        """Lay out one step."""
        original, lengths, plugin = self._layouts[number], self._lengths, self._plugin
        layout = sort_layout(original, self._widths)
        before = count_padded(self._widths, self._rows, original)
        after = count_padded(self._widths, self._rows, layout)
        if after > before:
            # This happens if micro-batches differ in their number of examples.
            layout, after = original, before
        with COUNTING:
            if number not in self._counted:
                self._counted.add(number)
                plugin.before += before
                plugin.after += after
                plugin.tokens += sum(
                    int(lengths[micro_batch].sum()) for rank in original for micro_batch in rank
                )
        return layout


def sort_layout(layout: list[list[Ints]], widths: Ints) -> list[list[Ints]]:
    """Fill a layout's micro-batches with its examples sorted, longest first.

    All ranks get one micro-batch before any gets the next, so that ranks have equal work.
    """
    # Longest first: an incomplete last micro-batch then has the shortest, and pads least.
    micro_batches = [batch for step in zip(*layout, strict=True) for batch in step]
    examples = np.concatenate(micro_batches)
    examples = examples[np.argsort(-widths[examples], kind="stable")]
    filled = np.split(examples, np.cumsum([len(batch) for batch in micro_batches])[:-1])
    return [filled[rank :: len(layout)] for rank in range(len(layout))]


def count_padded(widths: Ints, rows: Ints, layout: list[list[Ints]]) -> int:
    """Return the number of tokens in a step's padded micro-batches, padding included."""
    return sum(
        int(rows[micro_batch].sum()) * max(2, int(widths[micro_batch].max()))
        for rank in layout
        for micro_batch in rank
        if len(micro_batch)
    )
