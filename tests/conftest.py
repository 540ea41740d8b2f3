"""What tests share: tiny real data, tiny real recipes, and real processes."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

ROOT = Path(__file__).parents[1]
TEXT = "the quick brown fox jumps over a lazy dog while naïve cafés serve 東京 ramen to 12 owls"
# Nothing in a test may look for the network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.update(OFFLINE)


def chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Make chats of various lengths."""
    rng = random.Random(seed)

    def say(most: int) -> str:
        return " ".join(rng.choices(TEXT.split(), k=rng.randint(2, most)))

    rows = []
    for _ in range(count):
        messages = []
        for _ in range(rng.choice([1, 1, 2])):
            messages.append({"role": "user", "content": say(8)})
            messages.append({"role": "assistant", "content": say(14)})
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write rows as lines of JSON."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf8")
    return path


def tiny_tables(folder: Path, rows: list[Any] | None = None) -> dict[str, Any]:
    """Return the tables of a recipe that trains in a second; its files lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = write_jsonl(folder / "data.jsonl", chats(24) if rows is None else rows)
    return {
        "output": str(folder / "run"),
        "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 2, "vocab": 400, "context": 256}},
        "data": {"source": str(data), "max_length": 256},
        "train": {"batch_size": 8, "micro_batch": 4, "learning_rate": 3e-3, "log_every": 1},
    }


def write_recipe(path: Path, tables: dict[str, Any]) -> Path:
    """Write a recipe."""
    path.write_text(tomli_w.dumps(tables), encoding="utf8")
    return path


def run_plugsft(
    *arguments: object,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 300,
) -> "subprocess.CompletedProcess[str]":
    """Run `python -m plugsft ...` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "plugsft", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=cwd or ROOT,
        timeout=timeout,
    )


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read a run's training metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """Give `tiny(train={"steps": 3}, ...)`: a tiny recipe file, with tables merged in."""

    def make(rows: list[Any] | None = None, **tables: Any) -> Path:
        merged = tiny_tables(tmp_path, rows)
        for name, table in tables.items():
            if isinstance(table, dict) and isinstance(merged.get(name), dict):
                merged[name] = {**merged[name], **table}
            else:
                merged[name] = table
        return write_recipe(tmp_path / "recipe.toml", merged)

    return make
