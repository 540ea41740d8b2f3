"""Sort the examples inside each step by length, so that micro-batches pad less."""

from collections.abc import Generator
from threading import Lock

import numpy as np

from plugsft import Ints, Layout, Layouts, OnDemand, Recipe, RecipeError, hookimpl, plugin, state
from plugsft.kit.tokens import Tokens

COUNTING = Lock()
"""Training and evaluation windows may be laid out in different threads."""


@plugin(conflicts={"bfd_packing": "packed micro-batches hold no padding to save"})
class LengthGroup:
    """Sort the examples inside each step by length, so that micro-batches pad less."""

    tokens: int = state(0)
    before: int = state(0)
    """Tokens with padding, in the original micro-batches."""
    after: int = state(0)
    """Tokens with padding, in the sorted micro-batches."""
    seen: list[Tokens] = state([])
    """The tokens of training and of evaluation."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe without padding."""
        if recipe.train.micro_batch == 1:
            raise RecipeError(
                "train.micro_batch = 1 pads nothing, so there is nothing to save; raise it as far "
                "as memory allows, or remove [plugins.length_group]"
            )

    @hookimpl(wrapper=True)
    def annotate(self) -> Generator[None, Tokens, Tokens]:
        """Keep the tokens: each answer of a pair is padded as its own row."""
        tokens = yield
        self.seen.append(tokens)
        return tokens

    @hookimpl(wrapper=True)
    def batches(self, lengths: Ints) -> Generator[None, Layouts, Layouts]:
        """Deal every window's examples again, longest first."""
        layouts = yield
        tokens = next((tokens for tokens in self.seen if tokens.lengths is lengths), None)
        return Sorted(layouts, lengths, self, *(shapes_of(tokens) if tokens else ()))

    @hookimpl
    def verdict(self) -> str | None:
        """Say how much of the padding was saved."""
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


class Sorted(OnDemand):
    """Windows sorted on demand."""

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
        """Windows that the plugin has counted: a window may be laid out twice."""

    def __len__(self) -> int:
        return len(self._layouts)

    def lay_out(self, number: int) -> Layout:
        """Lay out one window."""
        original, lengths, plugin = self._layouts[number], self._lengths, self._plugin
        dealt = deal_again(original, self._widths)
        before, after = (padded(self._widths, self._rows, layout) for layout in (original, dealt))
        if after > before:
            # It happens where micro-batches differ in their number of examples.
            dealt, after = original, before
        with COUNTING:
            if number not in self._counted:
                self._counted.add(number)
                plugin.before += before
                plugin.after += after
                plugin.tokens += sum(int(lengths[part].sum()) for rank in original for part in rank)
        return dealt


def shapes_of(tokens: Tokens) -> tuple[Ints, Ints]:
    """Return each example's longest sequence, and its number of sequences."""
    sequences, _ = tokens.sequences(np.arange(len(tokens)))
    stops = np.searchsorted(np.cumsum(sequences), np.cumsum(tokens.lengths)) + 1
    rows = np.diff(stops, prepend=0)
    return np.maximum.reduceat(sequences, stops - rows), rows


def deal_again(layout: Layout, widths: Ints) -> Layout:
    """Fill a layout's micro-batches with its examples sorted, longest first.

    They are filled a micro-step at a time over all ranks, so that ranks have equal work.
    """
    # Longest first: a micro-batch that is cut short then holds the shortest, and pads least.
    parts = [part for step in zip(*layout, strict=True) for part in step]
    examples = np.concatenate(parts)
    examples = examples[np.argsort(-widths[examples], kind="stable")]
    dealt = np.split(examples, np.cumsum([len(part) for part in parts])[:-1])
    return [dealt[rank :: len(layout)] for rank in range(len(layout))]


def padded(widths: Ints, rows: Ints, layout: Layout) -> int:
    """Return how many tokens the padded micro-batches of a window hold, padding included."""
    return sum(
        int(rows[part].sum()) * max(2, int(widths[part].max()))
        for rank in layout
        for part in rank
        if len(part)
    )
