"""The sizes that `plugsft tune` probes, and the steps that it probes them on."""

import math
from collections.abc import Sequence

import numpy as np

from ...base.machine import look
from ...base.types import Ints
from ...batches.defaults import BatchDefaults
from ...batches.estimate import EstimatedColumns
from ...recipe.parse import anchored
from ...recipe.tables import Recipe
from ...registry import active as registry
from ...registry.load import resolve
from ...tokens.store import Tokens

MIN_RATIO = 1.25
"""Least ratio of two neighbouring sizes."""
CAPACITY_RATIO = math.sqrt(2)
"""Ratio of two neighbouring capacities."""


def lengths_of(recipe: Recipe, tokens: Tokens) -> Ints:
    """Return the tokens of each example in a batch."""
    return (tokens.share_prompts() if recipe.provides("shared_prompts") else tokens).lengths


def keeps_steps(recipe: Recipe) -> bool:
    """Tell whether a step has `batch_size` examples of the epoch's order, however it is packed."""
    _, active = resolve(anchored(recipe))
    active.attach(BatchDefaults())
    registry.check(active, recipe, look(), ["plan_batches"])
    size = recipe.train.batch_size
    order, lengths = np.arange(2 * size), np.full(2 * size, 2)
    layouts = active.hooks.plan_batches(
        order=order,
        lengths=lengths,
        columns=EstimatedColumns(lengths),
        ranks=1,
        train=recipe.train,
    )
    examples = np.concatenate([batch for rank in layouts[0] for batch in rank])
    return np.array_equal(np.sort(examples), order[:size])


def choose_steps(order: Ints, size: int, lengths: Ints, count: int) -> Ints:
    """Choose steps of an epoch, [step, example]; first the two that need most memory.

    The first begins with the longest example, the second has the most tokens; the others are
    evenly spaced in the steps sorted by tokens.
    """
    if len(order) < size:
        return order[None]
    steps = order[: len(order) // size * size].reshape(-1, size)
    sums = lengths[steps].sum(1)
    positions = np.linspace(0, len(sums) - 1, count).round().astype(int)
    spaced = np.argsort(sums, kind="stable")[positions]
    longest = steps[lengths[steps].max(1).argmax()].copy()
    longest[lengths[longest].argmax()] = longest[0]
    longest[0] = lengths.argmax()
    return np.stack([longest, steps[sums.argmax()], *steps[spaced]])


def micro_batches(share: int) -> list[int]:
    """Return sizes, rising, that divide a rank's share of a step evenly."""
    sizes = [share]
    for parts in range(2, share + 1):
        size = -(-share // parts)
        if size * MIN_RATIO <= sizes[-1]:
            sizes.append(size)
    return sizes[::-1]


def capacities(longest: int, largest_step: int) -> list[int]:
    """Return sizes, rising, from the longest example to a rank's tokens of the largest step."""
    sizes = [max(longest, largest_step)]
    while sizes[-1] > CAPACITY_RATIO * MIN_RATIO * longest:
        sizes.append(math.ceil(sizes[-1] / CAPACITY_RATIO))
    return sorted({*sizes, longest})


def with_own(sizes: Sequence[int], own: int) -> list[int]:
    """Insert the recipe's own size instead of sizes close to it."""
    near = min(own, sizes[-1])
    apart = [size for size in sizes if not near / MIN_RATIO < size < near * MIN_RATIO]
    return sorted([own, *apart])
