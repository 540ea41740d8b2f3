"""What the benches share: a command line, a recipe, a tokenizer, processes to measure in."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w

MAX_LENGTH = 4096


def command_line(doc: str) -> argparse.ArgumentParser:
    """Return a command line that tells the first line of a docstring and takes --json."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="writes what was measured")
    return parser


def keep(report: object, path: Path | None) -> None:
    """Write what was measured, if --json says where."""
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


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
        words = [sys.executable, "-m", "plugsft", "prepare", recipe]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        next(Path(made).glob("run/scratch/tokenizer-*")).rename(folder / "tokenizer")


def alone(*words: object, **environment: str) -> Any:
    """Run Python in a process of its own; return what the last line that it prints says."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
