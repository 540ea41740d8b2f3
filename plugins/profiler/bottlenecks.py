"""The profile of a finished run: shares, FLOP/s, and bottlenecks by rules, with their cures."""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from plugsft import Capability, DiskError, Recipe, say, write_text

from .clock import PARTS
from .flops import peak_flops
from .recorder import StepRecorder

Finding: TypeAlias = tuple[float, str]
"""Share of the time or memory, and the message."""
MOST = 3
"""Most bottlenecks to report."""


class StepProfile(NamedTuple):
    """The figures of a run's mean step."""

    shares: dict[str, float]
    """Part of a step -> its share of the time."""
    ranks: list[dict[str, float]]
    """Part of a step -> its seconds, for each rank."""
    micro_batches: float
    """Micro-batches per step."""
    launch_bound: bool = False
    """Whether calling operators takes longer than computing them."""
    operators: int = 0
    """Operators per forward."""
    operator_seconds: float = 0.0
    """Processor seconds per operator."""
    logits_bytes: float = 0.0
    """Peak bytes of logits and tensors computed from them."""


def find_bottlenecks(recipe: Recipe, run: dict[str, Any], profile: StepProfile) -> list[str]:
    """Return the worst bottlenecks, a line each; none if all is well."""
    rules = (
        waiting(recipe, profile),
        padding(recipe, run["batches"]["padding"]),
        launches(recipe, profile),
        logits(recipe, profile, run["memory"]["peak_gib"]),
        slowest_rank(recipe, profile, run["batches"]["imbalance"]),
        *intervals(recipe, profile, run["steps"]),
    )
    findings = sorted((finding for finding in rules if finding is not None), reverse=True)
    return [text for _, text in findings[:MOST]]


def waiting(recipe: Recipe, profile: StepProfile) -> Finding | None:
    """Tell whether a step waits for its batches."""
    share = profile.shares["wait"] + profile.shares["copy"]
    if share < 0.05:
        return None
    cure = f"add {Capability.bundled('batches_ahead').table}"
    if ahead := recipe.provides("batches_ahead"):
        raise_depth = f"raise {ahead.key} if only some do, or " if ahead.option else ""
        cure = (
            f"batches take longer to make than to train on, though {ahead.table} is on; "
            f"{raise_depth}give the machine more cores"
        )
    return share, f"waited {share:.0%} for data: {cure}"


def padding(recipe: Recipe, share: float) -> Finding | None:
    """Tell whether much of a batch is padding."""
    if share < 0.25:
        return None
    cure = f"add {Capability.bundled('packed_rows').table}"
    if recipe.provides("packed_rows"):
        key, capacity = recipe.micro_batch_size()
        cure = f"raise {key} from {capacity:,}"
    return share, f"padding {share:.0%}: {cure}"


def launches(recipe: Recipe, profile: StepProfile) -> Finding | None:
    """Tell whether a step mostly calls operators; larger micro-batches need fewer of them."""
    share = profile.shares["forward"] + profile.shares["backward"]
    if not profile.launch_bound or share < 0.3 or profile.micro_batches < 2:
        return None
    factor = 4 if profile.micro_batches >= 4 else 2
    key, size = recipe.micro_batch_size()
    unit = " tokens" if recipe.provides("packed_rows") else ""
    microseconds = profile.operator_seconds * 1e6
    return share, (
        f"launch-bound: {profile.operators:,} operators of {microseconds:.0f} us in a "
        f"forward: raise {key} from {size:,} to {factor * size:,}{unit}"
    )


def logits(recipe: Recipe, profile: StepProfile, peak_gib: float) -> Finding | None:
    """Tell whether logits take much of the memory."""
    share = profile.logits_bytes / 2**30 / peak_gib
    if share < 0.25 or recipe.provides("fused_head"):
        return None
    return share, f"loss head {share:.0%} of memory: add {Capability.bundled('fused_head').table}"


def slowest_rank(recipe: Recipe, profile: StepProfile, imbalance: float) -> Finding | None:
    """Tell whether ranks wait for the slowest."""
    busy = [
        sum(seconds[part] for part in ("wait", "copy", "forward", "backward"))
        for seconds in profile.ranks
    ]
    longest_step = max(sum(seconds.values()) for seconds in profile.ranks)
    share = (max(busy) - sum(busy) / len(busy)) / longest_step
    if share < 0.05:
        return None
    cure = "its machine is slower, or busy with other work; no recipe line changes that"
    if imbalance > 1.05 and not recipe.provides("packed_rows"):
        packing = Capability.bundled("packed_rows").table
        cure = f"the busiest has {imbalance:.2f}x the average: add {packing}"
    return share, f"others wait {share:.0%} for rank {busy.index(max(busy))}, the slowest: {cure}"


def intervals(recipe: Recipe, profile: StepProfile, steps: dict[str, int]) -> Iterator[Finding]:
    """Yield frequent checkpoints, evaluations and logging, and slow all-reduces."""
    per_epoch = steps["per_epoch"]
    interval = {
        "checkpoint": recipe.checkpoint.interval(steps["total"], per_epoch),
        "evaluation": recipe.eval.interval(per_epoch) if recipe.eval else 0,
    }
    cures = {
        "checkpoint": (0.1, "raise checkpoint.every"),
        "evaluation": (0.3, "raise eval.every"),
        "logging": (0.05, "see which plugin has `log`: `plugsft plugins RECIPE`"),
        "exchange": (
            0.25,
            "gradients are reduced once a step: a larger train.batch_size, or "
            f"{Capability.bundled('adapters').table}, reduces less, and affects results",
        ),
    }
    for part, (limit, cure) in cures.items():
        if (share := profile.shares[part]) >= limit:
            if every := interval.get(part):
                # The interval at which the part takes half of the limit.
                cure += f" from {every:,} to {math.ceil(every * share / (1 - share) * 2 / limit):,}"
            yield share, f"{part} {share:.0%}: {cure}"


FILE = "profile.json"
SMALL_OPERATOR = 50e-6
"""Seconds. On a CPU, calling an operator costs more than computing one that takes less."""
LOGIT_BYTES = 12
"""Peak bytes per logit: at most three float32 tensors of the logits' size exist at once."""


def summarize(recorder: StepRecorder, run: dict[str, Any]) -> str:
    """Print the bottlenecks, write the profile; return a line with each part's share."""
    mean = np.mean(recorder.steps, 0)
    rank_means = [means.tolist() for means in recorder.rank_means] or [mean.tolist()]
    shares = dict(zip(PARTS, mean / mean.sum(), strict=True))
    ranks = [dict(zip(PARTS, means, strict=True)) for means in rank_means]
    peak, device = peak_flops(recorder.device, run["dtypes"]["compute"])
    rate = recorder.flops / len(recorder.steps) / mean.sum()
    findings = find_bottlenecks(recorder.recipe, run, profile_of(recorder, shares, ranks))
    for line in findings:
        say(f"profile: {line}")
    run["profile"] = {
        "steps": len(recorder.steps),
        "shares": {name: round(share, 4) for name, share in shares.items()},
        "mfu": round(rate / peak, 4),
        "flops_per_second": round(rate),
        "peak_flops_per_second": round(peak),
        "findings": findings,
    }
    profile, path = {**run["profile"], "seconds_a_step": ranks}, recorder.recipe.folder / FILE
    try:
        write_text(path, json.dumps(profile, indent=1) + "\n")
    except DiskError as error:
        say(f"warning: {error}")
    visible = [f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005]
    return (
        f"{mean.sum():.3g} s a step: {', '.join(visible)}; "
        f"MFU {rate / peak:.0%} of {peak / 1e12:.3g} TFLOP/s ({device})"
    )


def profile_of(
    recorder: StepRecorder, shares: dict[str, float], ranks: list[dict[str, float]]
) -> StepProfile:
    """Return the figures that the rules for bottlenecks need."""
    micro_batches, counter = recorder.micro_batches / len(recorder.steps), recorder.operators
    if counter is None:
        return StepProfile(shares, ranks, micro_batches)
    seconds = recorder.forward_cpu_seconds / counter.operators
    launch_bound = seconds <= SMALL_OPERATOR
    if recorder.clock.on_gpu:
        launch_bound = recorder.idle_steps >= 0.8 * recorder.clock.steps
    logits_bytes = LOGIT_BYTES * counter.logits / counter.tokens * recorder.largest
    return StepProfile(
        shares, ranks, micro_batches, launch_bound, counter.operators, seconds, logits_bytes
    )
