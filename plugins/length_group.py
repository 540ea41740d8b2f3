"""Sort the examples inside each step by length, so that micro-batches pad less."""

from collections.abc import Generator
from threading import Lock

import numpy as np

from plugsft import Ints, Layout, Layouts, OnDemand, Recipe, RecipeError, hookimpl, plugin, state
from plugsft.kit.tokens import Tokens

COUNTING = Lock()
"""Steps of training and evaluation may be laid out in different threads."""


@plugin(
    conflicts={"bfd_packing": "packed micro-batches hold no padding to save"},
    provides={"sorted_lengths": None},
)
class LengthGroup:
    """Sort the examples inside each step by length, so that micro-batches pad less."""

    tokens: int = state(0)
    """Tokens without padding."""
    before: int = state(0)
    """Tokens with padding, in the original micro-batches."""
    after: int = state(0)
    """Tokens with padding, in the sorted micro-batches."""
    seen: list[Tokens] = state([])
    """The training data and the evaluation data."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe without padding."""
        if recipe.train.micro_batch == 1:
            raise RecipeError(
                "train.micro_batch = 1 pads nothing, so there is nothing to save; raise it as far "
                "as memory allows, or remove [plugins.length_group]"
            )

    @hookimpl(wrapper=True)
    def add_columns(self) -> Generator[None, Tokens, Tokens]:
        """Keep the tokens: each answer of a pair is padded as its own row."""
        tokens = yield
        self.seen.append(tokens)
        return tokens

    @hookimpl(wrapper=True)
    def plan_batches(self, lengths: Ints) -> Generator[None, Layouts, Layouts]:
        """Sort the examples of each step, longest first."""
        layouts = yield
        tokens = next((tokens for tokens in self.seen if tokens.lengths is lengths), None)
        return SortedSteps(layouts, lengths, self, *(shapes_of(tokens) if tokens else ()))

    @hookimpl
    def summary(self) -> str | None:
        """Report the share of the padding that was saved."""
        if not self.tokens:
            return None
        padding = self.before - self.tokens
        if not padding:
            return "no padding to save"
        return (
            f"{(self.before - self.after) / padding:.0%} of the padding saved: "
            f"{padding / self.before:.0%} of all tokens before, "
            f"{(self.after - self.tokens) / self.after:.0%} now"
        )


class SortedSteps(OnDemand):
    """Steps whose examples are sorted by length on demand.

    `widths` are the lengths of each example's longest sequence, `rows` its numbers of sequences.
    Default: each example is one sequence.
    """

    def __init__(
        self,
        layouts: Layouts,
        lengths: Ints,
        plugin: LengthGroup,
        widths: "Ints | None" = None,
        rows: "Ints | None" = None,
    ) -> None:
        self._layouts, self._lengths, self._plugin = layouts, lengths, plugin
        self._widths = lengths if widths is None else widths
        self._rows = np.ones_like(lengths) if rows is None else rows
        self._counted: set[int] = set()
        """Steps that the plugin has counted: a step may be laid out twice."""

    def __len__(self) -> int:
        return len(self._layouts)

    def lay_out(self, number: int) -> Layout:
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


def shapes_of(tokens: Tokens) -> tuple[Ints, Ints]:
    """Return each example's longest sequence, and its number of sequences."""
    sequences, _ = tokens.sequences(np.arange(len(tokens)))
    stops = np.searchsorted(np.cumsum(sequences), np.cumsum(tokens.lengths)) + 1
    rows = np.diff(stops, prepend=0)
    return np.maximum.reduceat(sequences, stops - rows), rows


def sort_layout(layout: Layout, widths: Ints) -> Layout:
    """Fill a layout's micro-batches with its examples sorted, longest first.

    All ranks get one micro-batch before any gets the next, so that ranks have equal work.
    """
    # Longest first: an incomplete last micro-batch then has the shortest, and pads least.
    micro_batches = [batch for step in zip(*layout, strict=True) for batch in step]
    examples = np.concatenate(micro_batches)
    examples = examples[np.argsort(-widths[examples], kind="stable")]
    filled = np.split(examples, np.cumsum([len(batch) for batch in micro_batches])[:-1])
    return [filled[rank :: len(layout)] for rank in range(len(layout))]


def count_padded(widths: Ints, rows: Ints, layout: Layout) -> int:
    """Return the number of tokens in a step's padded micro-batches, padding included."""
    return sum(
        int(rows[micro_batch].sum()) * max(2, int(widths[micro_batch].max()))
        for rank in layout
        for micro_batch in rank
        if len(micro_batch)
    )
