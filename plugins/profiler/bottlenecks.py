"""Bottlenecks of a run, by rules: their share, and the recipe line that removes them."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from plugsft import Recipe

Finding: TypeAlias = tuple[float, str]
"""Share of the time or memory, and the message."""
MOST = 3


class Measured(NamedTuple):
    """What was measured of the steps of a run."""

    shares: dict[str, float]
    """Part of a step -> its share of the time."""
    ranks: list[dict[str, float]]
    """The seconds of these parts on each rank."""
    micro_steps: float
    """Of a step."""
    small: bool = False
    """Whether operators take longer to be called than to compute."""
    operators: int = 0
    """Of a forward."""
    brief: float = 0.0
    """Seconds of each."""
    head: float = 0.0
    """Peak bytes of logits and tensors computed from them."""


def bottlenecks(recipe: Recipe, run: dict[str, Any], measured: Measured) -> list[str]:
    """Return the worst bottlenecks, a line each; none if all is well."""
    rules = (
        waiting(recipe, measured),
        padding(recipe, run["feeding"]["fill"]),
        launches(recipe, measured),
        head(recipe, measured, run["memory"]["peak_gib"]),
        slowest(recipe, measured, run["feeding"]["imbalance"]),
        *rhythms(recipe, measured, run["steps"]["total"]),
    )
    found = sorted((one for one in rules if one is not None), reverse=True)
    return [text for _, text in found[:MOST]]


def waiting(recipe: Recipe, measured: Measured) -> Finding | None:
    """Tell whether a step waits for its batches."""
    share = measured.shares["wait"] + measured.shares["copy"]
    if share < 0.05:
        return None
    cure = "add [plugins.async_collate]"
    if recipe.has("async_collate"):
        cure = (
            "batches take longer to make than to train on, though [plugins.async_collate] is on; "
            "raise its depth if only some do, or give the machine more cores"
        )
    return share, f"waited {share:.0%} for data: {cure}"


def padding(recipe: Recipe, fill: float) -> Finding | None:
    """Tell whether much of a batch is padding."""
    if fill > 0.75:
        return None
    cure = "add [plugins.bfd_packing]"
    if recipe.has("bfd_packing"):
        cure = f"raise plugins.bfd_packing.capacity from {recipe.packed_capacity():,}"
    return 1 - fill, f"fill {fill:.0%}, the rest is padding: {cure}"


def launches(recipe: Recipe, measured: Measured) -> Finding | None:
    """Tell whether a step mostly calls operators; larger micro-batches need fewer of them."""
    share, parts = measured.shares["forward"] + measured.shares["backward"], measured.micro_steps
    if not measured.small or share < 0.3 or parts < 2:
        return None
    times = 4 if parts >= 4 else 2
    if recipe.has("bfd_packing"):
        size, what, unit = recipe.packed_capacity(), "plugins.bfd_packing.capacity", " tokens"
    else:
        size, what, unit = recipe.train.micro_batch, "train.micro_batch", ""
    return share, (
        f"launch-bound: {measured.operators:,} operators of {measured.brief * 1e6:.0f} us in a "
        f"forward: raise {what} from {size:,} to {times * size:,}{unit}"
    )


def head(recipe: Recipe, measured: Measured, peak_gib: float) -> Finding | None:
    """Tell whether logits take much of the memory."""
    share = measured.head / 2**30 / peak_gib
    if share < 0.25 or recipe.has("fused_loss"):
        return None
    return share, f"loss head {share:.0%} of memory: add [plugins.fused_loss]"


def slowest(recipe: Recipe, measured: Measured, imbalance: float) -> Finding | None:
    """Tell whether ranks wait for one of them."""
    busy = [
        sum(one[name] for name in ("wait", "copy", "forward", "backward")) for one in measured.ranks
    ]
    most = max(busy)
    share = (most - sum(busy) / len(busy)) / max(sum(one.values()) for one in measured.ranks)
    if share < 0.05:
        return None
    cure = "its machine is slower, or busy with other work; no recipe line changes that"
    if imbalance > 1.05 and not recipe.has("bfd_packing"):
        cure = f"the busiest has {imbalance:.2f}x the average: add [plugins.bfd_packing]"
    return share, f"others wait {share:.0%} for rank {busy.index(most)}, the slowest: {cure}"


def rhythms(recipe: Recipe, measured: Measured, steps: int) -> Iterator[Finding]:
    """Yield frequent checkpoints, evaluations and logging, and slow all-reduces."""
    rhythm = {
        "checkpoint": recipe.checkpoint.interval(steps),
        "evaluation": recipe.eval.every if recipe.eval else 0,
    }
    cures = {
        "checkpoint": (0.1, "raise checkpoint.every"),
        "evaluation": (0.3, "raise eval.every"),
        "logging": (0.05, "see which plugin hears `log`: `plugsft plugins RECIPE`"),
        "exchange": (
            0.25,
            "gradients are reduced once a step: a larger train.batch_size, or [plugins.lora], "
            "reduces less, and affects results",
        ),
    }
    for name, (limit, cure) in cures.items():
        if (share := measured.shares[name]) >= limit:
            if often := rhythm.get(name):
                # The interval at which it takes half of the limit, if nothing else changes.
                cure += f" from {often:,} to {math.ceil(often * share / (1 - share) * 2 / limit):,}"
            yield share, f"{name} {share:.0%}: {cure}"
