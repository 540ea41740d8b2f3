"""The files of JSON lines that a run writes as it goes."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from ..base.limits import parse_json

SAMPLES = "samples.jsonl"
"""File in the output: step, prompt and answer in each line."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl that have a step; a killed run leaves a partial one."""
    lines = []
    for text in path.read_text("utf-8", errors="replace").split("\n") if path.exists() else ():
        with suppress(TypeError, ValueError):
            line = parse_json(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines
