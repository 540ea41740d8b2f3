"""Sort the examples inside each step by length, so that micro-batches pad less."""

from collections.abc import Generator
from threading import Lock

import numpy as np

from plugsft import Ints, Layout, Layouts, OnDemand, Recipe, RecipeError, hookimpl, plugin, state

COUNTING = Lock()
"""Windows may be laid out in several threads: of training, and of evaluation, ahead of both."""


@plugin(conflicts={"bfd_packing": "packed micro-batches hold no padding to save"})
class LengthGroup:
    """Sort the examples inside each step by length, so that micro-batches pad less."""

    tokens: int = state(0)
    before: int = state(0)
    """Places in the padded micro-batches, as they would have been."""
    after: int = state(0)
    """The same, as they are."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse what it would do nothing for."""
        if recipe.train.micro_batch == 1:
            raise RecipeError(
                "train.micro_batch = 1 pads nothing, so there is nothing to save; raise it as far "
                "as memory allows, or remove [plugins.length_group]"
            )

    @hookimpl(wrapper=True)
    def batches(self, lengths: Ints) -> Generator[None, Layouts, Layouts]:
        """Deal every window's examples again, longest first."""
        layouts = yield
        return Sorted(layouts, lengths, self)

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
            f"{padding / self.before:.0%} of all places before, "
            f"{(self.after - self.tokens) / self.after:.0%} now"
        )


class Sorted(OnDemand):
    """Windows that are sorted when they are asked for."""

    def __init__(self, layouts: Layouts, lengths: Ints, plugin: LengthGroup) -> None:
        self._layouts, self._lengths, self._plugin = layouts, lengths, plugin

    def __len__(self) -> int:
        return len(self._layouts)

    def lay_out(self, number: int) -> Layout:
        """Lay out one window."""
        given, lengths, plugin = self._layouts[number], self._lengths, self._plugin
        dealt = deal_again(given, lengths)
        before, after = places(lengths, given), places(lengths, dealt)
        if after > before:
            # It happens where micro-batches differ in their number of examples.
            dealt, after = given, before
        with COUNTING:
            plugin.before += before
            plugin.after += after
            plugin.tokens += sum(int(lengths[part].sum()) for rank in given for part in rank)
        return dealt


def deal_again(layout: Layout, lengths: Ints) -> Layout:
    """Fill a layout's places with its examples sorted, longest first.

    Places are filled a micro-step at a time over all ranks: who works side by side has equal work.
    """
    # Longest first: a micro-batch that is cut short then holds the shortest, and pads least.
    parts = [part for step in zip(*layout, strict=True) for part in step]
    examples = np.concatenate(parts)
    examples = examples[np.argsort(-lengths[examples], kind="stable")]
    dealt = np.split(examples, np.cumsum([len(part) for part in parts])[:-1])
    return [dealt[rank :: len(layout)] for rank in range(len(layout))]


def places(lengths: Ints, layout: Layout) -> int:
    """Return how many tokens the padded micro-batches of a window hold, padding included."""
    return sum(
        len(part) * int(lengths[part].max()) for rank in layout for part in rank if len(part)
    )
