"""The laws: each trains tiny runs, compares them, and says what to change."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from ..api.recipes import merged
from ..base.atomic import list_checkpoints, parse_step
from .tiny_runs import (
    LARGER_MICRO_BATCH,
    MICRO_BATCH,
    Tables,
    Trained,
    prepare,
    results,
    tiny_recipe,
    train,
    without_plugin,
    workers,
    write_shards,
)

ORDER = (
    "examples or targets were lost, doubled or moved to another step. 'plan_batches' may only lay "
    "out the examples of a step; 'render' and 'encode' may not change targets"
)
CURES = {
    "trained_tokens": ORDER,
    "loss": "it must be the sum over the micro-batch's targets, divided by `denominator` only: the "
    "core does all other scaling",
    "grad_norm": "the loss is equal, but its gradient is not. Look for a scaled or detached "
    "loss, hooks on gradients, frozen parameters, or lower precision in the backward pass",
}
"""Metric that differs first -> the likely cause."""
RANK_CURES = {
    "trained_tokens": ORDER,
    "loss": f"micro-batches have {MICRO_BATCH} examples on two ranks, and {LARGER_MICRO_BATCH} on "
    "one. Return the sum over the micro-batch's targets, not their mean. Divide by `denominator`, "
    "which counts the targets of the whole step, and let no result depend on the rank, on the size "
    "of a micro-batch or on other micro-batches",
    "grad_norm": "the loss is equal, but its gradient is not. All ranks must change gradients and "
    "weights in the same way",
}
SUMS = (
    "'add_metrics' returns sums over the rank's own micro-batches, not means; the core adds up "
    "those of all ranks and divides them"
)
KEEP = (
    "Return what the plugin has gathered from `state_dict`, and take it back in `load_state_dict`. "
    "An optimizer keeps it in `state` or in its parameter groups. Random numbers may follow from "
    "the seed and the step only"
)
SAME_STATE = (
    "it must be the same on all ranks. Compute it from what all ranks see (`run.step`, the metrics "
    "of `logged` and `evaluated`), or add it up with `run.ranks.reduce`"
)
OF_THE_CLOCK = {"tokens_per_second", "step_seconds", "data_wait_seconds", "memory_gib"}
"""Metrics that differ from run to run."""
OF_THE_LAYOUT = {"padding", "examples_per_micro_batch", "imbalance"}
"""Metrics that follow from the number of ranks."""
ROUNDS = 4
"""Runs with and without the plugin, in turns, of which one warms up."""


def keeps_gradients(
    name: str,
    options: Tables | None = None,
    *,
    tables: Tables | None = None,
    ranks: int = 1,
    tolerance: float = 1e-5,
) -> None:
    """Check that a run has the same losses and gradient norms as without the plugin."""
    who = f"plugin '{name}'"
    with tiny_recipe(name, options, tables) as recipe:
        jobs = [Job(without_plugin(recipe, name), ranks), Job(recipe, ranks)]
        (bare, *_), (trained, *_) = _train(jobs, who)
    _ensure_same_steps(bare.steps, trained.steps, who, ("without", "with it"))
    for before, after in zip(bare.steps, trained.steps, strict=True):
        for metric, cure in CURES.items():
            assert math.isclose(before[metric], after[metric], rel_tol=tolerance), (
                f"{who}: step {before['step']}: {metric} is {after[metric]:.8g} with it "
                f"and {before[metric]:.8g} without: {cure}"
            )


def resumes(
    name: str,
    options: Tables | None = None,
    *,
    tables: Tables | None = None,
    ranks: int = 1,
) -> None:
    """Check that a resumed run ends bit-equal to an uninterrupted one.

    The plugin's summary must be equal too, if it is in two uninterrupted runs.
    """
    who = f"plugin '{name}'"
    with tiny_recipe(name, options, {"checkpoint": {"every": 2}}) as recipe:
        recipe = merged(recipe, tables)
        [whole] = _train([Job(recipe, ranks)], who)
        checkpoint, *later = list_checkpoints(Path(recipe["output"], "checkpoints"))
        assert later, f"{who}: the run has one checkpoint; train for at least 4 steps"
        again = {**recipe, "output": f"{recipe['output']}-resumed"}
        [resumed] = _train([Job(again, ranks)], who, checkpoint)
        start = parse_step(checkpoint) or 0
        where = f"{who}: resumed after step {start}"
        _ensure_resumed(whole, resumed, start, where, name)
        text, resumed_text = (rank[0].summaries[name] for rank in (whole, resumed))
        if text != resumed_text:
            # Times, and what a cache had, differ between two uninterrupted runs too.
            second = {**recipe, "output": f"{recipe['output']}-second"}
            [[other, *_]] = _train([Job(second, ranks)], who)
            assert other.summaries[name] != text, (
                f"{where}: summary() is {resumed_text!r}, and {text!r} uninterrupted. {KEEP}"
            )


def ranks_agree(
    name: str,
    options: Tables | None = None,
    *,
    tables: Tables | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Check that two ranks learn what one learns, and have the same weights and state.

    Micro-batches on two ranks have half the examples of those on one, unless `tables` or packed
    rows set them: the loss may not depend on them.
    """
    who = f"plugin '{name}'"
    with tiny_recipe(name, options, {"device": "cpu", **(tables or {})}) as recipe:
        pair = {**recipe, "output": f"{recipe['output']}-ranks"}
        # A loss that depends on the size of its micro-batch may be the same on all ranks.
        jobs = [Job(recipe, micro_batch=LARGER_MICRO_BATCH), Job(pair, ranks=2)]
        [single], (first, second) = _train(jobs, who)
    _ensure_same_steps(single.metrics, first.metrics, who, ("on one rank", "on two"))
    for alone, together in zip(single.metrics, first.metrics, strict=True):
        names = alone.keys() - OF_THE_CLOCK - OF_THE_LAYOUT
        for metric in [*RANK_CURES, *sorted(names - RANK_CURES.keys())]:
            if metric not in names:
                continue  # an evaluation has others
            before, after = alone[metric], together.get(metric)
            assert _is_close(before, after, tolerance), (
                f"{who}: step {alone['step']}: {metric} is {after} on two ranks and {before} on "
                f"one: {RANK_CURES.get(metric, SUMS)}"
            )
    for weight in first.weights:
        assert first.weights[weight] == second.weights[weight], (
            f"{who}: {weight} differs between rank 0 and rank 1 at the end: whoever changes "
            "weights must do the same on all ranks"
        )
    for place, value, other in _differing(first, second, name):
        raise AssertionError(
            f"{who}: state_dict() at {place} is {value} on rank 0 and {other} on rank 1: "
            f"{SAME_STATE}"
        )


def survives_a_worker(
    name: str, options: Tables | None = None, *, tables: Tables | None = None
) -> None:
    """Check that the plugin writes the same tokens in a worker process."""
    who = f"plugin '{name}'"
    with tiny_recipe(name, options, tables) as recipe, workers(1, 1) as (main, other):
        main[0].call(prepare, recipe)
        [(work, slices, here)] = results(main, who)
        # Workers take slices in any order.
        other[0].call(write_shards, work, slices[::-1])
        [there] = results(other, f"{who} in a worker process")
    for file, content in here.items():
        assert there[file] == content, (
            f"{who}: a worker process wrote other tokens for the same rows. A row's "
            "tokens may depend only on the row and on the plugin's options: not on earlier rows, "
            "on state from check() or another process, on time or on random numbers"
        )


def costs_at_most(
    name: str,
    percent: float,
    options: Tables | None = None,
    *,
    tables: Tables | None = None,
) -> None:
    """Check that a step takes at most so much longer than without the plugin.

    Two processes train in turns, with and without it. The tiny model's steps take milliseconds, so
    this finds work that the plugin adds to every step, and not what it saves on a large model.
    """
    who = f"plugin '{name}'"
    with tiny_recipe(name, options, tables) as recipe:
        bare = without_plugin(recipe, name)
        seconds: list[list[float]] = [[], []]
        with workers(1, 1) as groups:
            for number in range(ROUNDS):
                for group, raw, times in zip(groups, (bare, recipe), seconds, strict=True):
                    output = {"output": f"{raw['output']}-{number}"}
                    group[0].call(train, merged(raw, output))
                    [trained] = results(group, who)
                    if number:  # the first run warms up, and so does the first step of each
                        times += [line["step_seconds"] for line in trained.steps[1:]]
    without, with_it = map(median, seconds)
    more = (with_it / without - 1) * 100
    assert more <= percent, (
        f"{who}: a step takes {_spread(seconds[1])} with it and {_spread(seconds[0])} without: "
        f"{more:.0f}% more, and at most {percent:g}% is allowed. Move work out of the hooks that "
        "are called for each micro-batch or step, and read no tensor's value there"
    )


def summary(name: str, options: Tables | None = None, *, tables: Tables | None = None) -> str:
    """Return the plugin's `summary` at the end of a tiny run."""
    with tiny_recipe(name, options, tables) as recipe:
        [[trained]] = _train([Job(recipe)], f"plugin '{name}'")
    return trained.summaries[name]


class Job(NamedTuple):
    """A recipe to train, and on how many ranks."""

    recipe: dict[str, Any]
    ranks: int = 1
    micro_batch: int = MICRO_BATCH


def _train(jobs: Sequence[Job], who: str, checkpoint: Path | None = None) -> list[list[Trained]]:
    """Train all recipes at once; return each rank's results."""
    with workers(*[job.ranks for job in jobs]) as groups:
        for job, group in zip(jobs, groups, strict=True):
            for worker in group:
                # Several ranks train on the CPU, on a machine with a GPU too.
                device = {"device": "cpu"} if job.ranks > 1 else {}
                worker.call(train, merged(job.recipe, device), checkpoint, job.micro_batch)
        return [results(group, who) for group in groups]


def _ensure_resumed(
    whole: Sequence[Trained], resumed: Sequence[Trained], start: int, where: str, name: str
) -> None:
    expected = [line for line in whole[0].metrics if line["step"] > start]
    _ensure_same_steps(expected, resumed[0].metrics, where, ("uninterrupted", "resumed"))
    for before, after in zip(expected, resumed[0].metrics, strict=True):
        for metric in [metric for metric in before if metric not in OF_THE_CLOCK]:
            assert before[metric] == after.get(metric), (
                f"{where}, step {before['step']}: {metric} is {after.get(metric)}, and "
                f"{before[metric]} uninterrupted. {KEEP}"
            )
    for rank, (uninterrupted, own) in enumerate(zip(whole, resumed, strict=True)):
        for weight, checksum in uninterrupted.weights.items():
            assert checksum == own.weights[weight], (
                f"{where}: {weight} is another one at the end on rank {rank}. {KEEP}"
            )
        for place, value, other in _differing(uninterrupted, own, name):
            raise AssertionError(
                f"{where}: state_dict() at {place} is {other} at the end on rank {rank}, and "
                f"{value} uninterrupted. {KEEP}"
            )


def _ensure_same_steps(
    before: Sequence[Tables], after: Sequence[Tables], where: str, names: tuple[str, str]
) -> None:
    assert len(before) == len(after), (
        f"{where}: {len(after)} steps and evaluations {names[1]}, and {len(before)} {names[0]}: "
        "'plan_batches' and 'order_examples' may only rearrange examples, and `run.stop` must be "
        "called after the same step"
    )


def _is_close(before: Any, after: Any, tolerance: float) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=tolerance, abs_tol=tolerance / 10)
    return bool(before == after)


def _differing(before: Trained, after: Trained, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield places of a plugin's state where two runs or ranks differ, with both values."""
    first, second = before.states.get(name, {}), after.states.get(name, {})
    for place in {**first, **second}:
        values = first.get(place, "missing"), second.get(place, "missing")
        if values[0] != values[1]:
            yield place or "its top", *values


def _spread(seconds: Sequence[float]) -> str:
    low, middle, high = (value * 1000 for value in quantiles(seconds, n=4))
    return f"{middle:.2f} ms (half of the steps: {low:.2f} to {high:.2f})"
