"""Tiny recipes and runs for the laws, and what a run has learned.

Each works in new processes: alone, or as one of several ranks.
"""

import json
import multiprocessing
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from .. import loop
from ..api.recipes import merged
from ..base.errors import choices
from ..base.machine import look
from ..base.types import Slice
from ..checkpoint.save import values_by_place
from ..checkpoint.tree import checksum_of
from ..data.defaults import DataDefaults
from ..data.prepare import open_data
from ..data.slices import ShardWriter
from ..output.metrics import read_metrics
from ..ranks.failures import PeerError, describe_failure
from ..recipe.tables import Recipe
from ..registry.active import Active, check
from ..registry.discover import find
from ..registry.load import resolve
from ..start.guards import police
from ..start.open import open_recipe

RawRecipe: TypeAlias = dict[str, Any]
"""A recipe's tables, not yet checked."""
START = multiprocessing.get_context("forkserver")
"""Starts processes that have imported torch, but neither the plugin nor state of this process."""
ROWS = 24
TEXT = "we pad short rows up to long ones naïvely and 東京 has 12 owls that read them all"
TINY: RawRecipe = {
    "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 2, "vocab": 400, "context": 256}},
    "data": {"max_length": 256},
    # Two epochs, in steps of several micro-batches that differ in length and in targets.
    "train": {"batch_size": 8, "learning_rate": 1e-3, "epochs": 2},
}
"""The tiny recipe, without its folders and plugins; docs/hooks.md shows it."""
MICRO_BATCH = 2
"""Its train.micro_batch, but where the packed rows of a plugin set the micro-batch."""
LARGER_MICRO_BATCH = 4


START.set_forkserver_preload([loop.__name__])

Tables = Mapping[str, Any]
Group = list[ProcessPoolExecutor]
"""The processes of a run's ranks."""


@contextmanager
def workers(*ranks: int) -> Iterator[list[Group]]:
    """Start a group of processes for each number of ranks; end them after the block."""
    with ExitStack() as stack:
        yield [
            [
                stack.enter_context(ProcessPoolExecutor(1, START, _set_environment, (variables,)))
                for variables in _environments(size)
            ]
            for size in ranks
        ]


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def call(worker: ProcessPoolExecutor, function: Callable[..., Any], *words: Any) -> Future[Any]:
    """Call a function in a process, which ends if the function fails."""

    def end_after_failure(future: Future[Any]) -> None:
        if future.exception():  # other ranks notice that this one is gone
            worker.shutdown(wait=False)

    future = worker.submit(function, *words)
    future.add_done_callback(end_after_failure)
    return future


def results(calls: Sequence[Future[Any]], who: str) -> list[Any]:
    """The results of all ranks; of several failures, a rank that failed by itself says why."""
    failures = filter(None, [future.exception() for future in calls])
    for error in sorted(failures, key=lambda error: isinstance(error, PeerError)):
        raise AssertionError(f"{who}: {describe_failure(error)}") from error
    return [future.result() for future in calls]


def _environments(size: int) -> list[dict[str, str]]:
    """Each rank's variables, as torchrun sets them; none for a single process."""
    if size == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


@contextmanager
def tiny_recipe(name: str, options: Tables | None, tables: Tables | None) -> Iterator[RawRecipe]:
    """Yield a recipe that trains in a second, in a temporary folder."""
    found = find()
    assert name in found, (
        f"no plugin '{name}' is installed{choices(name, found, 'there are:')}. A plugin is found "
        "by its entry point in the group 'plugsft', so install yours first: pip install -e ."
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, _chats())))
        recipe = {
            **merged(TINY, {"data": {"source": str(folder / "data.jsonl")}}),
            "output": str(folder / "run"),
            "plugins": {name: dict(options or {})},
        }
        yield merged(recipe, tables)


def without_plugin(recipe: Tables, name: str) -> RawRecipe:
    """The recipe to compare with, and another output folder."""
    plugins = {other: table for other, table in recipe["plugins"].items() if other != name}
    return {**recipe, "plugins": plugins, "output": f"{recipe['output']}-without"}


def _chats() -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    for _ in range(ROWS):
        ask, answer = (" ".join(rng.choices(TEXT.split(), k=rng.randint(2, 14))) for _ in range(2))
        turns = ("user", ask), ("assistant", answer)
        yield {"messages": [{"role": role, "content": content} for role, content in turns]}


@dataclass(frozen=True)
class Trained:
    """What a run has left on one rank."""

    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl; only the main process reads them."""
    summaries: dict[str, str]
    state: dict[str, str]
    """What a checkpoint would hold of this rank: a value's place, or a tensor's name -> its text or
    checksum."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of the steps, without those of evaluations."""
        return [line for line in self.metrics if "loss" in line]


def _resolve(raw: RawRecipe, micro_batch: int) -> tuple[Recipe, Active]:
    """Resolve a recipe; set its micro-batch where neither `tables` nor packed rows do."""
    recipe, active = resolve(raw)
    if "micro_batch" in raw["train"] or recipe.provides("packed_rows"):
        return recipe, active
    return resolve(merged(raw, {"train": {"micro_batch": micro_batch}}))


def train(
    raw: RawRecipe, checkpoint: Path | None = None, micro_batch: int = MICRO_BATCH
) -> Trained:
    """Train, perhaps from a checkpoint; return what was learned."""
    recipe, active = _resolve(raw, micro_batch)
    checkpoints = [checkpoint] if checkpoint else []
    police(active, bundled=True)
    # A tiny model gains nothing from threads, and several runs share the cores.
    opened = open_recipe(recipe, active, replace(look(), cores=1), checkpoints)
    loop.train(opened)
    lines = read_metrics(recipe.folder / "metrics.jsonl") if opened.is_main else []
    described, shards = opened.checkpoints.describe()
    sums = {name: checksum_of(shard.values) for name, shard in shards.items()}
    return Trained(lines, active.summaries(), values_by_place(described) | sums)


def prepare(raw: RawRecipe) -> tuple[ShardWriter, list[Slice], dict[str, bytes]]:
    """Prepare data as a run does; return the work, ready to travel, and what it writes here."""
    recipe, active = _resolve(raw, MICRO_BATCH)
    active.attach(DataDefaults(recipe.folder))
    check(active, recipe, look())
    data = open_data(recipe, active)
    rows, middle = len(data.sources[0]), len(data.sources[0]) // 2
    slices = [Slice(0, a, b, data.sources[0].part(a, b)) for a, b in ((0, middle), (middle, rows))]
    return data.work, slices, write_shards(data.work, slices)


def write_shards(work: ShardWriter, slices: list[Slice]) -> dict[str, bytes]:
    """Write slices as shards; return the content of each file."""
    with tempfile.TemporaryDirectory() as folder:
        shards = [*map(replace(work, folder=Path(folder)).tokenize, slices)]
        return {shard.file: Path(folder, shard.file).read_bytes() for shard in shards}
