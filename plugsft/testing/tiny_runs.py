"""Tiny recipes and runs for the laws, and what a run has learned.

Each works in new processes: alone, or as one of several ranks.
"""

import json
import multiprocessing
import os
import random
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from .. import loop, run
from ..api.recipes import merged
from ..base.errors import choices
from ..base.machine import look
from ..base.types import Slice, WeightSlice
from ..data.defaults import DataDefaults
from ..data.prepare import open_data
from ..data.slices import ShardWriter
from ..output.metrics import read_metrics
from ..ranks.agree import PeerError
from ..ranks.failures import reason_of
from ..registry.active import check
from ..registry.discover import find
from ..registry.load import resolve

START = multiprocessing.get_context("forkserver")
"""Starts processes that have imported torch, but neither the plugin nor state of this process."""
ROWS = 24
TEXT = "we pad short rows up to long ones naïvely and 東京 has 12 owls that read them all"
TINY: dict[str, Any] = {
    "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 2, "vocab": 400, "context": 256}},
    "data": {"max_length": 256},
    # Two epochs, in steps of several micro-batches that differ in length and in targets.
    "train": {"batch_size": 8, "learning_rate": 1e-3, "epochs": 2},
}
"""The tiny recipe, without its folders and plugins; plugins/README.md shows it."""
MICRO_BATCH = 2
"""Its train.micro_batch, but where the packed rows of a plugin set the micro-batch."""
LARGER_MICRO_BATCH = 4


START.set_forkserver_preload([loop.__name__])


class ProcessError(Exception):
    """The traceback of a failure in another process."""


class Answer(NamedTuple):
    """The result of a function in another process, or why it failed."""

    result: Any = None
    failure: str = ""
    trace: str = ""
    by_peer: bool = False
    """Whether it ended because another rank failed."""


class Worker:
    """A process that calls functions until one fails."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._pipe, far_end = START.Pipe()
        self._process = START.Process(target=_serve, args=(far_end, dict(environment)))
        self._process.start()
        far_end.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in the process; `answer` waits for it."""
        self._pipe.send((function, arguments))

    def answer(self) -> Answer:
        """Wait for the function's result, or for its failure."""
        try:
            return self._pipe.recv()  # type: ignore[no-any-return]
        except EOFError:
            self._process.join()
            return Answer(failure=f"its process ended with exit code {self._process.exitcode}")

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


@contextmanager
def workers(*ranks: int) -> Iterator[list[list[Worker]]]:
    """Start a group of processes for each number of ranks; end them after the block."""
    groups = [[Worker(environment) for environment in _environments(size)] for size in ranks]
    try:
        yield groups
    finally:
        for group in groups:
            for worker in group:
                worker.end()


def results(group: Sequence[Worker], who: str) -> list[Any]:
    """Return the results of all ranks; the first rank that failed by itself raises."""
    answers = [worker.answer() for worker in group]
    failures = [answer for answer in answers if answer.failure]
    for answer in sorted(failures, key=lambda answer: answer.by_peer):
        raise AssertionError(f"{who}: {answer.failure}") from ProcessError(f"\n{answer.trace}")
    return [answer.result for answer in answers]


def _environments(size: int) -> list[dict[str, str]]:
    """Return each rank's variables, as torchrun sets them; none for a single process."""
    if size == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    common["LOCAL_WORLD_SIZE"] = str(size)
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(Answer(function(*arguments)))
        except Exception as error:  # whatever a plugin raises
            pipe.send(
                Answer(
                    failure=reason_of(error),
                    trace=traceback.format_exc(),
                    by_peer=isinstance(error, PeerError),
                )
            )
            return  # other ranks notice that this one is gone


Tables = Mapping[str, Any]


@contextmanager
def tiny_recipe(
    name: str, options: Tables | None, tables: Tables | None
) -> Iterator[dict[str, Any]]:
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


def without_plugin(recipe: Tables, name: str) -> dict[str, Any]:
    """Return a recipe without a plugin, with another output folder."""
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
    weights: dict[str, str]
    """A checksum of each weight on this rank."""
    states: dict[str, dict[str, str]]
    """The state of each plugin: where in its `state_dict` -> a value as text."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of the steps, without those of evaluations."""
        return [line for line in self.metrics if "loss" in line]


def with_micro_batch(raw: dict[str, Any], size: int) -> dict[str, Any]:
    """Return a recipe with this micro-batch, where neither `tables` nor packed rows set it."""
    if "micro_batch" in raw["train"] or resolve(raw)[0].provides("packed_rows"):
        return raw
    return merged(raw, {"train": {"micro_batch": size}})


def train(
    raw: dict[str, Any], checkpoint: Path | None = None, micro_batch: int = MICRO_BATCH
) -> Trained:
    """Train, perhaps from a checkpoint; return what was learned."""
    recipe, active = resolve(with_micro_batch(raw, micro_batch))
    checkpoints = [checkpoint] if checkpoint else []
    # A tiny model gains nothing from threads, and several runs share the cores.
    opened = run.open(recipe, active, replace(look(), cores=1), checkpoints)
    loop.train(opened)
    lines = read_metrics(recipe.folder / "metrics.jsonl") if opened.is_main else []
    states = {name: dict(_flat(state)) for name, state in active.state_dicts().items()}
    shards = opened.weights.shards()
    weights = {name: _checksum(shard) for name, shard in shards.items()}
    return Trained(lines, active.summaries(), weights, states)


def _flat(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a plugin's state as text, each with its place."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield where, f"{type(value).__name__} of {len(value)}"
        for key, item in items:
            yield from _flat(item, f"{where}/{key}" if where else str(key))
    elif isinstance(value, WeightSlice):
        yield where, f"slice of {value.weight}: {_describe(value.values)}"
    else:
        yield where, _describe(value) if isinstance(value, Tensor) else repr(value)


def _describe(tensor: Tensor) -> str:
    values = repr(tensor.tolist()) if tensor.numel() <= 4 else f"checksum {_checksum(tensor)}"
    return f"{tensor.dtype}{[*tensor.shape]}, {values}"


def _checksum(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(data.data)


def prepare(raw: dict[str, Any]) -> tuple[ShardWriter, list[Slice], dict[str, bytes]]:
    """Prepare data as a run does; return the work, ready to travel, and what it writes here."""
    recipe, active = resolve(with_micro_batch(raw, MICRO_BATCH))
    active.attach(DataDefaults(recipe.folder))
    check(active, recipe, look())
    data = open_data(recipe, active)
    rows, middle = len(data.sources[0]), len(data.sources[0]) // 2
    slices = [Slice(0, a, b, data.sources[0].part(a, b)) for a, b in ((0, middle), (middle, rows))]
    return data.work, slices, write_shards(data.work, slices)


def write_shards(work: ShardWriter, slices: list[Slice]) -> dict[str, bytes]:
    """Write slices as shards; return the content of each file."""
    with tempfile.TemporaryDirectory() as folder:
        here = replace(work, folder=Path(folder))
        names = [here.tokenize(part).file for part in slices]
        return {name: Path(folder, name).read_bytes() for name in names}
