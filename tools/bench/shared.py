"""What the benches share: a command line, a recipe, a tokenizer, processes to measure in."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import tomli_w

from plugsft.base.types import Ints, Shard
from plugsft.lab.bench import timing as measured
from plugsft.lab.bench.timing import head, machine_line, spread, times_as_fast
from plugsft.tokens.shards import Examples, write_index, write_shard
from plugsft.tokens.store import Tokens

# What `plugsft bench` measures with.
__all__ = ["head", "machine_line", "spread", "times_as_fast"]

T = TypeVar("T")
MAX_LENGTH = 4096
VOCAB = 32_000


def command_line(doc: str) -> argparse.ArgumentParser:
    """Return a command line that tells the first line of a docstring and takes --json."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="writes what was measured")
    return parser


def keep(report: Mapping[str, Any], path: Path | None) -> None:
    """Write what was measured, with the machine and versions, if --json says where."""
    if path:
        path.write_text(measured.as_json({**head("trl"), **report}))


def tables(output: Path, source: Path, **changes: dict) -> dict[str, Any]:
    """Return a recipe's tables, with changes to them."""
    made = {
        "output": str(output),
        "model": {"scratch": {"context": MAX_LENGTH}},
        "data": {"source": str(source), "max_length": MAX_LENGTH},
        "train": {"batch_size": 8, "learning_rate": 1e-5},
    }
    return made | {name: made.get(name, {}) | change for name, change in changes.items()}


def write_recipe(path: Path, *parts: Path, **changes: dict) -> Path:
    """Write a recipe of such tables."""
    path.write_text(tomli_w.dumps(tables(*parts, **changes)))
    return path


def train_tokenizer(folder: Path, source: Path, vocab: int) -> None:
    """Make folder/tokenizer from a source, as a recipe from scratch does."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        recipe = write_recipe(
            Path(made, "recipe.toml"),
            Path(made, "run"),
            source,
            model={"scratch": {"context": MAX_LENGTH, "vocab": vocab}},
            plugins={"fast_tokenizer": {}},
        )
        run(sys.executable, "-m", "plugsft", "prepare", recipe)
        next(Path(made).glob("run/scratch/tokenizer-*")).rename(folder / "tokenizer")


def alone(*words: object, **environment: str) -> Any:
    """Run Python in a process of its own; return what the last line that it prints says."""
    return json.loads(run(sys.executable, *words, **environment).splitlines()[-1])


def run(*words: object, **environment: str) -> str:
    """Run a command, and return what it prints; where it fails, end with what it says."""
    command = [*map(str, words)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}")
    return done.stdout


def in_turn(rounds: int, contenders: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Run each contender once a round, in an order of its own; return what each gave."""
    made = list(measured.in_rounds(rounds, contenders))
    return {name: [one[name] for one in made] for name in contenders}


def in_rounds(rounds: int, **contenders: Callable[[], object]) -> dict[str, list[float]]:
    """Run each contender once a round; return the seconds they took."""

    def timed(contender: Callable[[], object]) -> float:
        started = time.perf_counter()
        contender()
        return time.perf_counter() - started

    return in_turn(rounds, {name: partial(timed, one) for name, one in contenders.items()})


def beside(one: Sequence[float], other: Sequence[float]) -> str:
    """Say how many times as fast one was as another, of the seconds that each took in a round."""
    return measured.times_as_fast(one, other).phrase


def draw_lengths(count: int, mean: float, sigma: float, least: int, most: int) -> Ints:
    """Draw lognormal lengths; the same numbers give the same lengths."""
    drawn = np.random.default_rng(count).lognormal(mean, sigma, count)
    return drawn.clip(least, most).astype(np.int64)


def write_tokens(folder: Path, lengths: Ints, shards: int) -> Tokens:
    """Write prepared examples of random tokens; of each the second half is trained."""
    folder.mkdir()
    dice, written = np.random.default_rng(0), []
    for number, rows in enumerate(np.array_split(np.arange(len(lengths)), shards)):
        counts = lengths[rows]
        ids = dice.integers(0, VOCAB, counts.sum(), np.int32)
        mask = places_of(counts) >= np.repeat(counts // 2, counts)
        shard = Shard(f"data-{number:05}.arrow", len(rows))
        write_shard(folder / shard.file, Examples(ids, mask, counts, np.ones_like(rows), rows))
        written.append(shard)
    sources = [{"name": "random", "examples": len(lengths), "weight": 1.0}]
    write_index(folder, written, {"key": "random", "sources": sources})
    return Tokens(folder)


def places_of(counts: Ints) -> Ints:
    """Return each token's place in its document."""
    places: Ints = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def trl_table(tokens: Tokens) -> pa.Table:
    """Return tokens in the form that TRL prepares: all ids, and labels of -100 in between."""
    ids, mask = tokens.gather(np.arange(len(tokens)))
    offsets = np.append(0, np.cumsum(tokens.lengths))
    labels = np.where(mask, ids.astype(np.int64), -100)
    columns = {"input_ids": ids, "labels": labels}
    return pa.table(
        {
            name: pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
            for name, values in columns.items()
        }
    )
