"""Which examples make which step: a pure function of lengths, seed, epoch and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from ..base.errors import DataError, PluginError
from ..base.types import Ints, Layout, Layouts, OnDemand, Window
from ..hooks import Hooks
from ..recipe.tables import Recipe, Train
from ..tokens.store import Tokens


class Windows(OnDemand):
    """The core's layout: windows of `batch_size` in the epoch's order, each rank its share."""

    def __init__(self, order: Ints, ranks: int, train: Train) -> None:
        self._order, self._ranks, self._train = order, ranks, train

    def __len__(self) -> int:
        return -(-len(self._order) // self._train.batch_size)

    def lay_out(self, number: int) -> Layout:
        """Deal out one window."""
        size = self._train.batch_size
        return lay_out(
            self._order[number * size : (number + 1) * size], self._ranks, self._train.micro_batch
        )


def lay_out(examples: Ints, ranks: int, micro: int) -> Layout:
    """Deal examples to ranks, a micro-batch at a time; the last ranks may get none."""
    steps = -(-len(examples) // (ranks * micro))
    return [
        [examples[(step * ranks + rank) * micro :][:micro] for step in range(steps)]
        for rank in range(ranks)
    ]


class Plan:
    """All steps of a run. Seeking costs the same for every step."""

    def __init__(self, tokens: Tokens, recipe: Recipe, ranks: int, hook: Hooks) -> None:
        self.tokens, self._train, self.ranks, self._hook = tokens, recipe.train, ranks, hook
        self._sources = [
            (source["examples"], source["weight"]) for source in tokens.facts["sources"]
        ]
        if empty := int(np.count_nonzero(tokens.units == 0)):
            raise DataError(
                f"{empty:,} of {len(tokens.units):,} examples have no trained token, and a step of "
                "them no loss. The plugin that cuts or masks examples must leave them out"
            )
        self._epochs: dict[int, Layouts] = {}
        self.per_epoch = len(self._epoch(0))
        if not self.per_epoch:
            raise DataError("an epoch has no example: raise the weights of [[data.sources]]")
        self.examples_in_a_step = f"{recipe.train.batch_size} examples"
        if self.per_epoch != -(-self._examples // recipe.train.batch_size):
            self.examples_in_a_step = f"{self._examples / self.per_epoch:,.1f} examples on average"
        self.steps = recipe.train.steps or recipe.train.epochs * self.per_epoch

    @classmethod
    def once_through(cls, tokens: Tokens, recipe: Recipe, ranks: int, hook: Hooks) -> Self:
        """Plan a single epoch of evaluation."""
        train = recipe.train.model_copy(update={"epochs": 1, "steps": None})
        return cls(tokens, recipe.model_copy(update={"train": train}), ranks, hook)

    def window(self, step: int) -> Window:
        """Return the window of a step; the first is step 1."""
        epoch, number = divmod(step - 1, self.per_epoch)
        self.tokens.ensure_unchanged()
        layout = self._epoch(epoch)[number]
        ranks = [np.concatenate(parts) for parts in layout]
        shares = [int(self.tokens.lengths[chosen].sum()) for chosen in ranks]
        return Window(
            step=step,
            epoch=epoch,
            layout=layout,
            total=int(self.tokens.units[np.concatenate(ranks)].sum()),
            trained=int(self.tokens.trained[np.concatenate(ranks)].sum()),
            tokens=sum(shares),
            imbalance=max(shares) * len(shares) / sum(shares),
        )

    def _epoch(self, epoch: int) -> Layouts:
        if epoch not in self._epochs:
            # Two at most: the one that trains, and the next, of which a feeder builds ahead.
            self._epochs = {old: kept for old, kept in self._epochs.items() if old >= epoch - 1}
            order = shuffled(self._sources, self._train.seed, epoch)
            self._examples = len(order)
            layouts = self._hook.batches(
                order=order,
                lengths=self.tokens.lengths,
                ranks=self.ranks,
                train=self._train,
            )
            if self._epochs and len(layouts) != self.per_epoch:
                raise PluginError(
                    f"'batches' gave {len(layouts)} windows for epoch {epoch} and {self.per_epoch} "
                    "for the first; every epoch must have the same number"
                )
            self._epochs[epoch] = layouts
        return self._epochs[epoch]


def shuffled(sources: Sequence[tuple[int, float]], seed: int, epoch: int) -> Ints:
    """Return an epoch's examples in order; a source's weight says how often each is taken."""
    # Philox is counter-based: its stream follows from (seed, epoch) alone, on every platform.
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    parts, first = [], 0
    for count, weight in sources:
        whole, rest = divmod(weight, 1.0)
        parts += [np.arange(first, first + count)] * int(whole)
        if rest:
            parts.append(first + random.permutation(count)[: round(rest * count)])
        first += count
    order: Ints = np.concatenate(parts)
    random.shuffle(order)
    return order
