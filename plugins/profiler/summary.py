"""The profile of a finished run: shares, FLOP/s and bottlenecks."""

import json
from typing import Any

import numpy as np

from plugsft import DiskError, say, write_text

from .bottlenecks import StepProfile, find_bottlenecks
from .clock import PARTS
from .flops import peak_flops
from .recorder import StepRecorder

FILE = "profile.json"
SMALL_OPERATOR = 30e-6
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
