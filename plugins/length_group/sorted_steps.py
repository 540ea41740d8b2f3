"""Steps whose examples are sorted by length, and their padding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from plugsft import Ints, Layouts


class SortedSteps(Layouts):
    """Steps whose examples are sorted by length on demand; each sequence is padded as a row."""

    def __init__(self, layouts: Layouts, lengths: Ints, columns: Mapping[str, Ints]) -> None:
        self._layouts, self._lengths = layouts, lengths
        self._widths, self._rows = columns["longest"], columns["sequences"]
        self.padding: dict[int, tuple[int, int, int]] = {}
        """Step -> its tokens, and those with padding before and after; it may be laid out twice."""

    def __len__(self) -> int:
        return len(self._layouts)

    def lay_out(self, number: int) -> list[list[Ints]]:
        """Lay out one step."""
        original = self._layouts[number]
        layout = sort_layout(original, self._widths)
        before = count_padded(self._widths, self._rows, original)
        after = count_padded(self._widths, self._rows, layout)
        if after > before:
            # This happens if micro-batches differ in their number of examples.
            layout, after = original, before
        examples = np.concatenate([batch for rank in original for batch in rank])
        self.padding[number] = int(self._lengths[examples].sum()), before, after
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
