"""Shared by the benchmarks: command line, recipes, tokenizer, child processes, rounds."""

import argparse
import ctypes
import json
import os
import signal
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
from plugsft.lab import timing
from plugsft.lab.timing import Ratio, head, spread
from plugsft.tokens.shards import Examples, write_index, write_shard
from plugsft.tokens.store import Tokens

# From `plugsft bench`.
__all__ = ["head", "spread", "times_as_fast"]

T = TypeVar("T")
MAX_LENGTH = 4096
VOCAB = 32_000
END = "<!-- to here -->\n"
"""The line of a page after a table that a script writes."""


def command_line(doc: str) -> argparse.ArgumentParser:
    """Return a parser with --json and the docstring's first line as its description."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser


def write_report(report: Mapping[str, Any], path: Path | None) -> None:
    """Write the figures, with machine and versions, to the file of --json."""
    if path:
        path.write_text(timing.as_json({**head("trl"), **report}))


def write_table(page: Path, begin: str, table: str) -> None:
    """Write a table between two lines of a page."""
    before, mark, rest = page.read_text(encoding="utf8").partition(begin)
    after = rest.partition(END)[2]
    page.write_text(before + mark + table + END + after, encoding="utf8")


def tables(output: Path | str, source: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's tables with changes."""
    defaults: dict[str, Any] = {
        "output": str(output),
        "model": {"scratch": {"context": MAX_LENGTH}},
        "data": {"source": str(source), "max_length": MAX_LENGTH},
        "train": {"batch_size": 8, "learning_rate": 1e-5},
    }
    return defaults | {name: defaults.get(name, {}) | change for name, change in changes.items()}


def write_recipe(path: Path, output: Path, source: Path, **changes: dict[str, Any]) -> Path:
    """Write a recipe of `tables(...)`."""
    path.write_text(tomli_w.dumps(tables(output, source, **changes)))
    return path


def train_tokenizer(folder: Path, source: Path, vocab: int) -> None:
    """Train folder/tokenizer on a source, as a recipe from scratch does."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        recipe = write_recipe(
            Path(temporary, "recipe.toml"),
            Path(temporary, "run"),
            source,
            model={"scratch": {"context": MAX_LENGTH, "vocab": vocab}},
            plugins={"fast_tokenizer": {}},
        )
        run(sys.executable, "-m", "plugsft", "prepare", recipe)
        next(Path(temporary).glob("run/scratch/tokenizer-*")).rename(folder / "tokenizer")


def run_python(*words: object, **environment: str) -> Any:
    """Run Python in a fresh process; return its last line of output, parsed as JSON."""
    return json.loads(run(sys.executable, *words, **environment).splitlines()[-1])


def run(*words: object, **environment: str) -> str:
    """Run a command and return its output; exit with its error if it fails."""
    command = [*map(str, words)]
    process = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=end_with_parent,
    )
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{process.stderr}")
    return process.stdout


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however that ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def collect_rounds(rounds: int, contenders: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Run each contender once a round, in random order; return its results."""
    results = list(timing.in_rounds(rounds, contenders))
    return {name: [result[name] for result in results] for name in contenders}


def machine_line(machine: Mapping[str, Any]) -> str:
    """Describe a machine in one line."""
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']:g} GiB, {gpus}"


def in_rounds(rounds: int, **contenders: Callable[[], object]) -> dict[str, list[float]]:
    """Run each contender once a round; return the seconds of each run."""

    def measure(contender: Callable[[], object]) -> float:
        started = time.perf_counter()
        contender()
        return time.perf_counter() - started

    return collect_rounds(
        rounds, {name: partial(measure, contender) for name, contender in contenders.items()}
    )


def times_as_fast(one: Sequence[float], other: Sequence[float]) -> Ratio:
    """Compare the seconds of one contender in each round with those of another."""
    return Ratio(tuple(b / a for a, b in zip(one, other, strict=True)))


def compare_speed(seconds: Sequence[float], others: Sequence[float]) -> str:
    """Describe the speed relative to another contender, from the seconds of each round."""
    ratio = times_as_fast(seconds, others)
    return f"{ratio} as fast, {ratio.word}"


def draw_lengths(count: int, mean: float, sigma: float, shortest: int, longest: int) -> Ints:
    """Draw lognormal lengths; the same numbers give the same lengths."""
    lengths = np.random.default_rng(count).lognormal(mean, sigma, count)
    return lengths.clip(shortest, longest).astype(np.int64)


def write_tokens(folder: Path, lengths: Ints, shards: int, vocab: int = VOCAB) -> Tokens:
    """Write prepared examples of random tokens; the second half of each is trained."""
    folder.mkdir()
    dice, written = np.random.default_rng(0), []
    for number, rows in enumerate(np.array_split(np.arange(len(lengths)), shards)):
        counts = lengths[rows]
        ids = dice.integers(0, vocab, counts.sum(), np.int32)
        mask = positions_of(counts) >= np.repeat(counts // 2, counts)
        shard = Shard(f"data-{number:05}.arrow", len(rows))
        write_shard(folder / shard.file, Examples(ids, mask, counts, np.ones_like(rows), rows))
        written.append(shard)
    sources = [{"name": "random", "examples": len(lengths), "weight": 1.0}]
    write_index(folder, written, {"key": "random", "sources": sources})
    return Tokens(folder)


def positions_of(counts: Ints) -> Ints:
    """Return each token's position in its document."""
    positions: Ints = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return positions


def trl_table(tokens: Tokens) -> pa.Table:
    """Return tokens as TRL prepares them: ids, and labels with -100 if untrained."""
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
