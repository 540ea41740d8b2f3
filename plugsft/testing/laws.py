"""The laws: each trains tiny runs, compares them, and says what to change."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..api.recipes import merged
from ..base.atomic import list_checkpoints, parse_step
from .tiny_runs import (
    LARGER_MICRO_BATCH,
    MICRO_BATCH,
    RawRecipe,
    Tables,
    Trained,
    call,
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
    "'add_metrics' returns sums over the rank's own micro-batches, or pairs of a sum and a count, "
    "not means; the core adds up those of all ranks and divides them"
)
KEEP = (
    "Return what the plugin has gathered from `state_dict`, and take it back in `load_state_dict`. "
    "An optimizer keeps it in its `state` of each weight. Random numbers may follow from the seed "
    "and the step only"
)
SAME_STATE = (
    "it must be the same on all ranks: whoever changes weights does so on all of them. Compute "
    "state from what all ranks see (`run.step`, the metrics of `logged`), or add "
    "it up with `run.ranks.reduce`"
)
OF_THE_CLOCK = frozenset(("tokens_per_second", "step_seconds", "data_wait_seconds", "memory_gib"))
"""Metrics that differ from run to run."""
OF_RANKS = OF_THE_CLOCK | {"padding", "examples_per_micro_batch", "imbalance"}
"""These, and metrics that follow from the number of ranks."""
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
    lines = bare.steps, trained.steps
    _ensure_same_metrics(*lines, who, ("without", "with it"), tolerance, CURES)


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
        where, labels = f"{who}: resumed after step {start}", ("uninterrupted", "resumed")
        lines = [line for line in whole[0].metrics if line["step"] > start]
        _ensure_same_metrics(lines, resumed[0].metrics, where, labels, 0.0, {}, KEEP)
        for rank, (one, other) in enumerate(zip(whole, resumed, strict=True)):
            _ensure_same_state(one, other, f"{where}, rank {rank}", labels, KEEP)
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
    lines, labels = (single.metrics, first.metrics), ("on one rank", "on two ranks")
    _ensure_same_metrics(*lines, who, labels, tolerance, RANK_CURES, SUMS, OF_RANKS)
    _ensure_same_state(first, second, who, ("on rank 0", "on rank 1"), SAME_STATE)


def survives_a_worker(
    name: str, options: Tables | None = None, *, tables: Tables | None = None
) -> None:
    """Check that the plugin writes the same tokens in a worker process."""
    who = f"plugin '{name}'"
    with tiny_recipe(name, options, tables) as recipe, workers(1, 1) as (main, other):
        [(work, slices, here)] = results([call(main[0], prepare, recipe)], who)
        # Workers take slices in any order.
        written = call(other[0], write_shards, work, slices[::-1])
        [there] = results([written], f"{who} in a worker process")
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
                    [trained] = results([call(group[0], train, merged(raw, output))], who)
                    if number:  # the first run warms up, and so does the first step of each
                        times += [line["step_seconds"] for line in trained.steps[1:]]
    without, with_it = map(median, seconds)
    more = (with_it / without - 1) * 100
    assert more <= percent, (
        f"{who}: a step takes {with_it * 1000:.2f} ms with it and {without * 1000:.2f} ms without: "
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

    recipe: RawRecipe
    ranks: int = 1
    micro_batch: int = MICRO_BATCH


def _train(jobs: Sequence[Job], who: str, checkpoint: Path | None = None) -> list[list[Trained]]:
    """Train all recipes at once; return each rank's results."""
    with workers(*[job.ranks for job in jobs]) as groups:
        calls = []
        for job, group in zip(jobs, groups, strict=True):
            # Several ranks train on the CPU, on a machine with a GPU too.
            recipe = merged(job.recipe, {"device": "cpu"} if job.ranks > 1 else {})
            words = train, recipe, checkpoint, job.micro_batch
            calls.append([call(worker, *words) for worker in group])
        return [results(each, who) for each in calls]


def _ensure_same_metrics(
    before: Sequence[Tables],
    after: Sequence[Tables],
    where: str,
    labels: tuple[str, str],
    tolerance: float,
    cures: Mapping[str, str],
    cure: str = "",
    left_out: frozenset[str] = OF_THE_CLOCK,
) -> None:
    """Compare each step's metrics that have a cure; with a `cure` for all others, these too."""
    assert len(before) == len(after), (
        f"{where}: {len(after)} steps and evaluations {labels[1]}, and {len(before)} {labels[0]}: "
        "'plan_batches' and 'order_examples' may only rearrange examples, and `run.stop` must be "
        "called after the same step"
    )
    for one, other in zip(before, after, strict=True):
        others = [name for name in one if name not in left_out] if cure else []
        for metric in dict.fromkeys([*(name for name in cures if name in one), *others]):
            value, wanted = other.get(metric), one[metric]
            assert _is_close(wanted, value, tolerance), (
                f"{where}, step {one['step']}: {metric} is {value} {labels[1]} and {wanted} "
                f"{labels[0]}: {cures.get(metric, cure)}"
            )


def _ensure_same_state(
    one: Trained, other: Trained, where: str, labels: tuple[str, str], cure: str
) -> None:
    """Compare the weights, and the states of the optimizer and of plugins."""
    for place in {**one.state, **other.state}:
        wanted, value = one.state.get(place, "missing"), other.state.get(place, "missing")
        assert value == wanted, (
            f"{where}: {place} is {value} {labels[1]} and {wanted} {labels[0]}: {cure}"
        )


def _is_close(before: Any, after: Any, tolerance: float) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=tolerance, abs_tol=tolerance / 10)
    return bool(before == after)
