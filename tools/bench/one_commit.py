"""Measure one commit: commits.py runs this by the Python of each, so it imports plugsft.api alone.

Prints the seconds of each case and the losses, as a line of JSON. The first argument is a folder
with rows.jsonl, pairs.jsonl, and the runs of two models, small-run and tiny-run.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import plugsft.api

API: Any = plugsft.api if hasattr(plugsft.api, "prepare") else plugsft
"""Older commits have these functions beside the names for plugins."""
SKIPPED = 3
"""The first steps of a run, which are not counted."""
PACKED: dict[str, Any] = {"bfd_packing": {"capacity": 1024, "overlong": "truncate"}}
QUESTIONS = [f"What is {word}?" for word in ("a river", "a stone", "a bridge", "a boat", "a mill")]


def main() -> None:
    """Measure all cases."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as output:
        seconds = {"prepare": prepare(folder, Path(output))}
        runs = {
            "plan and collate": train(
                folder,
                Path(output, "collate"),
                {"batch_size": 128, "micro_batch": 16, "steps": 10},
                "tiny",
                profiler={},
            ),
            "packed step": train(
                folder, Path(output, "packed"), {"batch_size": 8, "steps": 12}, **PACKED
            ),
            "DPO step": train(
                folder,
                Path(output, "dpo"),
                {"batch_size": 4, "micro_batch": 2, "steps": 12},
                rows="pairs",
                dpo={},
            ),
        }
        steps = {name: read_steps(run) for name, run in runs.items()}
        for name, lines in steps.items():
            seconds[name] = statistics.median(line["step_seconds"] for line in lines[SKIPPED:])
        profile = json.loads((runs["plan and collate"] / "profile.json").read_text())
        seconds["plan and collate"] = profile["seconds_a_step"][0]["wait"]
        seconds["answers"] = answer(runs["packed step"])
    losses = {name: [line["loss"] for line in lines] for name, lines in steps.items()}
    print(json.dumps({"seconds": seconds, "losses": losses}))


def tables(folder: Path, output: Path, model: str, rows: str, **data: Any) -> dict[str, Any]:
    """Return the tables of a recipe."""
    return {
        "output": str(output),
        "model": {"path": str(folder / f"{model}-run/model")},
        "data": {
            "source": str(folder / f"{rows}.jsonl"),
            "max_length": 512,
            "on_bad_row": "drop",
            **data,
        },
        "train": {"batch_size": 8, "learning_rate": 1e-4, "log_every": 1_000},
        "checkpoint": {"every": 0},
    }


def prepare(folder: Path, output: Path) -> float:
    """Return the processor seconds of a preparation, once all is imported."""
    API.prepare(tables(folder, output / "first", "small", "rows", split="train[:100]"))
    started = time.process_time()
    API.prepare(tables(folder, output / "all", "small", "rows"))
    return time.process_time() - started


def train(
    folder: Path,
    output: Path,
    size: dict[str, int],
    model: str = "small",
    rows: str = "rows",
    **plugins: Any,
) -> Path:
    """Train, and return the run's folder."""
    recipe = tables(folder, output, model, rows)
    API.train(recipe | {"train": recipe["train"] | size, "plugins": plugins})
    return output


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def answer(run: Path) -> float:
    """Return the seconds of answers of 64 tokens to a few questions."""
    trained = API.load_run(run)
    trained.generate(QUESTIONS, max_tokens=2)
    started = time.perf_counter()
    trained.generate(QUESTIONS, max_tokens=64)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
