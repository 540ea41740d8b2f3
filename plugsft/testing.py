"""The laws of plugsft as checks for a plugin's own tests.

    from plugsft import testing

    def test_it_changes_nothing_that_is_learned():
        testing.keeps_gradients("my_plugin", {"my_option": 3})

Every check trains a tiny model on tiny data in new processes and a temporary folder. A failing
check raises AssertionError and says what to change. `tables` are merged into the tiny recipe, for
plugins that need other plugins, data or settings.
"""

import functools
import json
import math
import multiprocessing
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from . import loop, run
from .base.errors import did_you_mean
from .base.machine import look
from .base.types import Slice
from .data.defaults import DataDefaults
from .data.prepare import open_data
from .data.slices import ShardWriter
from .output.report import read_metrics
from .registry.active import check, resolve
from .registry.discover import find

ROWS = 24
TEXT = "we pad short rows up to long ones naïvely and 東京 has 12 owls that read them all"
CURES = {
    "trained_tokens": "examples or targets were lost, doubled or moved to another step. 'batches' "
    "may only rearrange the examples of a step; 'render' and 'encode' may not change targets",
    "loss": "it must be the sum over the micro-batch's targets, divided by `denominator` only: the "
    "core does all other scaling",
    "grad_norm": "the loss is equal, but its gradient is not. Look for a scaled or detached "
    "loss, hooks on gradients, frozen parameters, or lower precision in the backward pass",
}
"""Metric that differs first -> the likely cause."""

Tables = Mapping[str, Any]
Job = TypeVar("Job")
Result = TypeVar("Result")


def keeps_gradients(
    name: str,
    options: Tables | None = None,
    tables: Tables | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Check that a run has the same losses and gradient norms as without the plugin."""
    with _recipe(name, options, tables) as recipe:
        others = {other: given for other, given in recipe["plugins"].items() if other != name}
        bare = {**recipe, "plugins": others, "output": recipe["output"] + "-without"}
        (without, _), (with_it, _) = _run(_train, [bare, recipe], f"plugin '{name}'")
    assert len(without) == len(with_it), (
        f"plugin '{name}': {len(with_it)} steps with it and {len(without)} without: "
        "'plan_batches' may only rearrange the examples of a step"
    )
    for before, after in zip(without, with_it, strict=True):
        for metric, cure in CURES.items():
            assert math.isclose(before[metric], after[metric], rel_tol=tolerance), (
                f"plugin '{name}': step {before['step']}: {metric} is {after[metric]:.8g} with it "
                f"and {before[metric]:.8g} without: {cure}"
            )


def survives_worker(name: str, options: Tables | None = None, tables: Tables | None = None) -> None:
    """Check that the plugin writes the same tokens in a worker process."""
    with _recipe(name, options, tables) as recipe:
        [(work, slices, here)] = _run(_prepare, [recipe], f"plugin '{name}'")
        # Workers take slices in any order.
        write = functools.partial(_write, slices=slices[::-1])
        [there] = _run(write, [work], f"plugin '{name}' in a worker process")
    for file, content in here.items():
        assert there[file] == content, (
            f"plugin '{name}': a worker process wrote other tokens for the same rows. A row's "
            "tokens may depend only on the row and on the plugin's options: not on earlier rows, "
            "on state from check() or another process, on time or on random numbers"
        )


def returns_what_it_wrapped(
    name: str, options: Tables | None = None, tables: Tables | None = None
) -> None:
    """Check that a run completes and that every wrapper returns its result."""
    with _recipe(name, options, tables) as recipe:
        _run(_train, [recipe], f"plugin '{name}'")


def summary(name: str, options: Tables | None = None, tables: Tables | None = None) -> str:
    """Return the plugin's `summary` at the end of a tiny run."""
    with _recipe(name, options, tables) as recipe:
        [(_, summaries)] = _run(_train, [recipe], f"plugin '{name}'")
    return summaries[name]


@contextmanager
def _recipe(name: str, options: Tables | None, tables: Tables | None) -> Iterator[dict[str, Any]]:
    """Yield a recipe that trains in a second, in a temporary folder."""
    found = find()
    assert name in found, (
        f"no plugin '{name}' is installed{did_you_mean(name, found) or ';'} there are: "
        f"{', '.join(found)}. A plugin is found by its entry point in the group 'plugsft', so "
        "install yours first: pip install -e ."
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, _chats())))
        scratch = {"hidden": 32, "layers": 2, "heads": 2, "vocab": 400, "context": 256}
        # Two epochs, in steps of several micro-batches that differ in length and in targets.
        recipe: dict[str, Any] = {
            "output": str(folder / "run"),
            "model": {"scratch": scratch},
            "data": {"source": str(folder / "data.jsonl"), "max_length": 256},
            "train": {"batch_size": 8, "micro_batch": 2, "learning_rate": 1e-3, "epochs": 2},
            "plugins": {name: dict(options or {})},
        }
        for key, value in (tables or {}).items():
            known = recipe.get(key)
            recipe[key] = {**known, **value} if isinstance(known, dict) else value
        yield recipe


def _chats() -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    for _ in range(ROWS):
        ask, answer = (" ".join(rng.choices(TEXT.split(), k=rng.randint(2, 14))) for _ in range(2))
        turns = ("user", ask), ("assistant", answer)
        yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def _run(function: Callable[[Job], Result], jobs: Sequence[Job], who: str) -> list[Result]:
    """Run all jobs at once in new processes; a failure becomes an AssertionError."""
    # The fork server has imported torch, but neither the plugin nor state of this process.
    servers = multiprocessing.get_context("forkserver")
    servers.set_forkserver_preload([loop.__name__])
    with ProcessPoolExecutor(len(jobs), servers, max_tasks_per_child=1) as pool:
        try:
            return list(pool.map(function, jobs))
        except Exception as error:  # whatever a plugin raises: the traceback stays below it
            raise AssertionError(f"{who}: {type(error).__name__}: {error}") from error


def _train(raw: dict[str, Any]) -> tuple[list[Tables], dict[str, str]]:
    """Train; return the metrics of every step, and the summaries."""
    recipe, active = resolve(raw)
    # A tiny model gains nothing from threads, and several runs share the cores.
    loop.train(run.open(recipe, active, replace(look(), cores=1)))
    lines = read_metrics(recipe.folder / "metrics.jsonl")
    return [line for line in lines if "loss" in line], active.summaries()


def _prepare(raw: dict[str, Any]) -> tuple[ShardWriter, list[Slice], dict[str, bytes]]:
    """Prepare data as a run does; return the work, ready to travel, and what it writes here."""
    recipe, active = resolve(raw)
    active.attach(DataDefaults(recipe.folder))
    check(active, recipe, look())
    data = open_data(recipe, active)
    rows, middle = len(data.sources[0]), len(data.sources[0]) // 2
    slices = [Slice(0, a, b, data.sources[0].part(a, b)) for a, b in ((0, middle), (middle, rows))]
    return data.work, slices, _write(data.work, slices)


def _write(work: ShardWriter, slices: list[Slice]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        here = replace(work, folder=Path(folder))
        return {(shard := here(one)).file: Path(folder, shard.file).read_bytes() for one in slices}
