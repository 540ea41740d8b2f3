"""What plugins that are not bundled may give to the training, checked as it runs.

The laws prove bundled plugins. For others, `police` guards the stages that they answer or wrap,
outside of all plugins.
"""

from collections.abc import Generator
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..base.errors import PluginError
from ..base.types import Batch, Ints, Layout, Layouts
from ..batches.labels import target_places
from ..hooks import Hooks, hookimpl, with_plugins
from ..registry.active import Active
from ..tokens.shards import offsets_of
from ..tokens.store import Tokens

Wrapper: TypeAlias = Generator[None, Any, Any]
LONG = ("add_columns", "order_examples", "plan_batches", "collate")
"""Stages whose guards look at each example."""


class Guard:
    """Refuses what stages give, where no run could learn from it."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    @hookimpl(wrapper=True)
    def add_columns(self) -> Wrapper:
        """Refuse a column that has no value for each example."""
        tokens: Tokens = yield
        count = len(tokens.lengths)
        for name, values in tokens.columns.items():
            if len(values) != count:
                raise PluginError(
                    f"{with_plugins(self._hooks.add_columns)} gave the column '{name}' of length "
                    f"{len(values):,} for {count:,} examples; it must give one value for each"
                )
        return tokens

    @hookimpl(wrapper=True)
    def order_examples(self, tokens: Tokens, epoch: int) -> Wrapper:
        """Refuse an order that is no list of examples."""
        order = yield
        where = with_plugins(self._hooks.order_examples)
        return ensure_examples(order, len(tokens.lengths), where, f"epoch {epoch}")

    @hookimpl(wrapper=True)
    def plan_batches(self, order: Ints, lengths: Ints, ranks: int) -> Wrapper:
        """Refuse layouts that do not have each example of the epoch's order once."""
        layouts = yield
        planner = with_plugins(self._hooks.plan_batches)
        guarded = GuardedLayouts(layouts, len(lengths), ranks, planner)
        counts = np.bincount(order, minlength=len(lengths))
        for step in guarded:
            for examples in chain(*step):
                np.subtract.at(counts, examples, 1)
        repeated, lost = np.flatnonzero(counts < 0), np.flatnonzero(counts > 0)
        if repeated.size:
            raise PluginError(
                f"{planner} laid out example {repeated[0]:,} more often than the epoch's order has "
                "it; it must lay out each example once"
            )
        if lost.size:
            raise PluginError(
                f"{planner} left out {lost.size:,} examples of the epoch, such as example "
                f"{lost[0]:,}; it must lay out each example once. Leave examples out in "
                "'order_examples'"
            )
        return guarded

    @hookimpl(wrapper=True)
    def collate(self, tokens: Tokens, examples: Ints) -> Wrapper:
        """Refuse a batch that trains other targets than its examples have, or at other tokens."""
        batch: Batch = yield
        maker = with_plugins(self._hooks.collate)
        if not isinstance(batch.get("input_ids"), Tensor):
            raise PluginError(f"{maker} gave a batch without the tensor 'input_ids'; add it")
        if getattr(batch.get("labels"), "ndim", 0) == 2:
            ensure_targets(batch, tokens, examples, maker)
        elif (tokens.weights(examples) != 1).any():
            raise PluginError(
                f"{maker} gave no label for each token, so that the rows' weights cannot be "
                'assigned to targets; data.ignore = ["weight"] trains without them'
            )
        return batch

    @hookimpl(wrapper=True)
    def step(self) -> Wrapper:
        """Refuse a loss that is not one number, or from which no weight could learn."""
        loss: Tensor = yield
        hooks = self._hooks
        makers = f"{with_plugins(hooks.step)}, with {with_plugins(hooks.token_nll)},"
        if loss.numel() != 1:
            raise PluginError(
                f"{makers} gave no tensor of one number; it must give the micro-batch's loss"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise PluginError(
                f"{makers} gave a loss that depends on no trained weight; detach nothing"
            )
        return loss


class GuardedLayouts(Layouts):
    """Layouts that are checked step by step, as they are laid out."""

    def __init__(self, layouts: Layouts, count: int, ranks: int, planner: str) -> None:
        self._layouts, self._count, self._ranks, self._planner = layouts, count, ranks, planner

    def __len__(self) -> int:
        return len(self._layouts)

    def lay_out(self, number: int) -> Layout:
        """Lay out a step; refuse what the planner may not give."""
        layout = self._layouts[number]
        try:
            counts = [len(micro_batches) for micro_batches in layout]
        except TypeError:  # a number in place of a list
            counts = []
        if len(counts) != self._ranks or len({*counts}) != 1 or not counts[0]:
            raise PluginError(
                f"{self._planner} gave micro-batches per rank: {counts}; it must give each of "
                f"{self._ranks} ranks the same number, and at least one"
            )
        place = f"step {number + 1} of the epoch"
        return [
            [ensure_examples(part, self._count, self._planner, place) for part in rank]
            for rank in layout
        ]


def police(active: Active, bundled: bool = False) -> None:
    """Guard `step`, and what other plugins than ours answer or wrap, or also those of `bundled`."""
    names = {name for name in active.plugins if bundled or not active.is_bundled(name)}
    stages = [hook for hook in LONG if names & {*active.having(hook)}]
    guard = Guard(active.hooks)
    active.guard = SimpleNamespace(**{stage: getattr(guard, stage) for stage in [*stages, "step"]})


def ensure_examples(numbers: Any, count: int, where: str, place: str) -> Ints:
    """Refuse what are no numbers of examples."""
    try:
        examples = np.asarray(numbers)
    except ValueError:  # lists of different lengths
        examples = np.asarray(numbers, object)
    if examples.size and (examples.dtype.kind not in "iu" or examples.ndim != 1):
        raise PluginError(
            f"{where} gave {examples.dtype} values of shape {[*examples.shape]} for {place}; it "
            "must give a list of example numbers"
        )
    if examples.size and not 0 <= examples.min() <= examples.max() < count:
        wrong = examples[(examples < 0) | (examples >= count)][0]
        raise PluginError(
            f"{where} gave the example {wrong:,} for {place}, but there are {count:,}, from 0 to "
            f"{count - 1:,}"
        )
    return examples.astype(np.int64)


def ensure_targets(batch: Batch, tokens: Tokens, examples: Ints, maker: str) -> None:
    """Refuse targets whose labels or tokens are not those of the examples."""
    ids, mask = tokens.gather(examples)
    # Nothing comes before the first token of a sequence, so it is no target.
    mask[offsets_of(tokens.sequences(examples)[0])[:-1]] = False
    expected = torch.from_numpy(ids[mask])
    places = target_places(batch) + 1
    for name in ("labels", "input_ids"):
        flat = batch[name].flatten().cpu()
        given = flat[places[places < len(flat)]]
        if not torch.equal(given.to(expected.dtype), expected):
            raise PluginError(
                f"{maker} gave {len(given):,} targets for examples with {len(expected):,}, and "
                f"other '{name}' than their tokens: it must keep all targets, in order, each "
                "labelled with its own token id"
            )
