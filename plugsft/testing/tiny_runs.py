"""Tiny recipes and runs for the laws, and what a run has learned."""

import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from ..output.run_record import read_metrics
from ..registry.active import check
from ..registry.discover import find
from ..registry.load import resolve

ROWS = 24
TEXT = "we pad short rows up to long ones naïvely and 東京 has 12 owls that read them all"

Tables = Mapping[str, Any]

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
    shards = opened.train_state.shards()
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
        return {(shard := here(one)).file: Path(folder, shard.file).read_bytes() for one in slices}
