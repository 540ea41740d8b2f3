"""The samples that a plugin writes to the output, as trackers take texts."""

import importlib
import json
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any

Samples = list[tuple[str, str]]
"""Prompts and answers of a step."""


class NewSamples:
    """Reads the lines that are added to samples.jsonl."""

    def __init__(self, path: Path, step: int) -> None:
        self._path, self._step, self._size = path, step, -1

    def read(self) -> dict[int, Samples]:
        """Return the samples of later steps than those before, by step."""
        size = self._path.stat().st_size if self._path.exists() else -1
        if size == self._size:
            return {}
        self._size, samples = size, dict[int, Samples]()
        for text in self._path.read_text(encoding="utf8").splitlines() if size > 0 else ():
            with suppress(ValueError, LookupError, TypeError):
                line = json.loads(text)
                if line["step"] > self._step:
                    samples.setdefault(line["step"], []).append((line["prompt"], line["answer"]))
        self._step = max(samples, default=self._step)
        return samples


def log_samples(kind: str, tracker: Any, step: int, samples: Samples) -> None:
    """Log samples as the tracker shows texts: a table, Markdown, or a file."""
    if kind == "wandb":
        table = importlib.import_module("wandb").Table(["prompt", "answer"], samples)
        tracker.log({"samples": table, "step": step})
        return
    # Indented, Markdown shows them as they are.
    shown = [[indent(text, "    ") for text in sample] for sample in samples]
    text = "\n\n".join(f"Prompt:\n\n{prompt}\n\nAnswer:\n\n{answer}" for prompt, answer in shown)
    if kind == "mlflow":
        importlib.import_module("mlflow").log_text(text, f"samples/step-{step:06d}.md")
    elif kind == "trackio":
        tracker.log({"samples": importlib.import_module("trackio").Markdown(text)}, step=step)
    else:
        tracker.log({"samples": text}, step=step)
