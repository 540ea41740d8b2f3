"""The examples of each step: a pure function of lengths, seed, epoch and step."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np
import xxhash

from ..base.checksums import digest
from ..base.errors import DataError, PluginError
from ..base.types import Ints, Layout, Layouts, StepPlan
from ..hooks import Hooks
from ..recipe.tables import Recipe, Train
from ..tokens.store import Tokens


class InOrder(Layouts):
    """The core's layout: `batch_size` examples a step, in the epoch's order."""

    def __init__(self, order: Ints, ranks: int, train: Train) -> None:
        self._order, self._ranks, self._train = order, ranks, train

    def __len__(self) -> int:
        return -(-len(self._order) // self._train.batch_size)

    def lay_out(self, number: int) -> Layout:
        """Lay out one global batch."""
        size = self._train.batch_size
        examples = self._order[number * size : (number + 1) * size]
        return split_over_ranks(examples, self._ranks, self._train.micro_batch)


def split_over_ranks(examples: Ints, ranks: int, size: int) -> Layout:
    """Split a global batch into micro-batches of `size`; the last ranks may get empty ones."""
    num_micro_batches = -(-len(examples) // (ranks * size))
    starts = [
        [(number * ranks + rank) * size for number in range(num_micro_batches)]
        for rank in range(ranks)
    ]
    return [[examples[start : start + size] for start in of_rank] for of_rank in starts]


class Plan:
    """The steps of a run. Planning a late step takes no longer than an early one."""

    def __init__(
        self, tokens: Tokens, recipe: Recipe, ranks: int, hooks: Hooks, evaluates: bool = False
    ) -> None:
        """Plan a run, or one epoch for an evaluation."""
        self.tokens, self._train, self.ranks, self._hooks = tokens, recipe.train, ranks, hooks
        self._evaluates, self._columns = evaluates, tokens.plan_columns()
        if empty := int(np.count_nonzero(tokens.targets == 0)):
            raise DataError(
                f"{empty:,} of {len(tokens.lengths):,} examples have no trained token, so a step "
                "of them has no loss. The plugin that cuts or masks examples must leave them out"
            )
        self._row_limit = recipe.micro_batch_size() if recipe.provides("packed_rows") else None
        self._epochs: dict[int, Epoch] = {}
        self._lock = Lock()  # steps may be planned in several threads
        first = self._epoch(0)
        self.per_epoch, self.examples = len(first.layouts), first.num_examples
        if not self.per_epoch:
            raise DataError("an epoch has no example: raise the weights of [[data.sources]]")
        train = recipe.train
        self.steps = self.per_epoch if evaluates else train.steps or train.epochs * self.per_epoch

    def describe_step(self) -> str:
        """Describe the size of a step: "16 examples"."""
        if self.per_epoch == -(-self.examples // self._train.batch_size):
            return f"{min(self._train.batch_size, self.examples)} examples"
        return f"{self.examples / self.per_epoch:,.1f} examples on average"

    def plan_step(self, step: int) -> StepPlan:
        """Plan a step; the first is step 1."""
        epoch, number = divmod(step - 1, self.per_epoch)
        layout = self._epoch(epoch).layouts[number]
        self._ensure_rows_fit(layout)
        rank_examples = [np.concatenate(micro_batches) for micro_batches in layout]
        rank_tokens = [int(self.tokens.lengths[examples].sum()) for examples in rank_examples]
        examples = np.concatenate(rank_examples)
        return StepPlan(
            step=step,
            epoch=epoch,
            layout=layout,
            denominator=self.tokens.divisor(examples),
            targets=int(self.tokens.targets[examples].sum()),
            tokens=sum(rank_tokens),
            imbalance=max(rank_tokens) * len(rank_tokens) / max(1, sum(rank_tokens)),
        )

    def _ensure_rows_fit(self, layout: Layout) -> None:
        """Refuse packed rows longer than their option says: the model is proved up to it only."""
        if self._row_limit is None:
            return
        key, limit = self._row_limit
        sizes = [int(self.tokens.lengths[examples].sum()) for rank in layout for examples in rank]
        if max(sizes) > limit:
            raise DataError(
                f"{key}: 'plan_batches' put {max(sizes):,} tokens into a packed row, more than "
                f"{limit:,}; raise it, or lower data.max_length"
            )

    def compared(self) -> dict[str, str]:
        """Describe the number of steps and the layout of the first, to compare ranks."""
        first = self.plan_step(1)
        layout = [[examples.tolist() for examples in rank] for rank in first.layout]
        columns = {
            name: xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values).data)
            for name, values in self.tokens.columns.items()
        }
        step_one = {
            "layout": layout,
            "targets": first.denominator,
            "order": self._epoch(0).order_checksum,
        }
        return {
            "the number of steps": f"{self.steps:,}",
            "the order of examples": digest(step_one)[:8],
            "the columns of examples": digest(columns)[:8],
        }

    def _epoch(self, epoch: int) -> Epoch:
        """Plan an epoch, unless that is done; keep the one before, whose steps may still come."""
        with self._lock:
            if epoch not in self._epochs:
                self._epochs = {n: known for n, known in self._epochs.items() if n >= epoch - 1}
                self._epochs[epoch] = self._plan_epoch(epoch)
            return self._epochs[epoch]

    def _plan_epoch(self, number: int) -> Epoch:
        seed = self._train.seed
        if self._evaluates:  # which takes each example once
            order = shuffle_sources(self.tokens, seed, number)
        else:
            order = self._hooks.order_examples(tokens=self.tokens, epoch=number, seed=seed)
        layouts = self._hooks.plan_batches(
            order=order,
            lengths=self.tokens.lengths,
            columns=self._columns,
            ranks=self.ranks,
            train=self._train,
        )
        if number and len(layouts) != self.per_epoch:
            raise PluginError(
                f"'order_examples' and 'plan_batches' gave {len(layouts)} steps for epoch "
                f"{number} and {self.per_epoch} for the first; every epoch must have the same "
                "number"
            )
        checksum = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(order).data)
        return Epoch(layouts, len(order), checksum)


class Epoch(NamedTuple):
    """The steps of an epoch, which together lay out each example of its order once."""

    layouts: Layouts
    num_examples: int
    order_checksum: str
    """To compare ranks."""


def small_data(train: Train, examples: int) -> str:
    """Return a warning if an epoch has fewer examples than a global batch."""
    warning = (
        f"train.batch_size = {train.batch_size:,} is larger than the data: each step trains on all "
        f"{examples:,} examples; lower it, or add data"
    )
    return warning if train.batch_size > examples else ""


def shuffle_sources(tokens: Tokens, seed: int, epoch: int) -> Ints:
    """Return the core's order of an epoch: all sources shuffled, by their weights."""
    sources = [(source["examples"], source["weight"]) for source in tokens.facts["sources"]]
    return shuffle(sources, seed, epoch)


def shuffle(sources: Sequence[tuple[int, float]], seed: int, epoch: int) -> Ints:
    """Return the order of an epoch; each example comes `weight` times, for (count, weight)."""
    # Philox is counter-based: its stream follows from (seed, epoch) alone, on every platform.
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    repeats, first = [], 0
    for count, weight in sources:
        whole, fraction = divmod(weight, 1.0)
        repeats += [np.arange(first, first + count)] * int(whole)
        if fraction:
            repeats.append(first + random.permutation(count)[: round(fraction * count)])
        first += count
    order: Ints = np.concatenate(repeats)
    random.shuffle(order)
    return order
