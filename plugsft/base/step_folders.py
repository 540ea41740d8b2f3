"""Checkpoint folders, `step-` and a number; other files in there belong to the user."""

import re
from pathlib import Path

from .atomic import is_published

NAME = re.compile(r"step-([0-9]+)")


def step_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint after a step."""
    return checkpoints / f"step-{step:06d}"


def parse_step(path: Path) -> int | None:
    """Return the step of a checkpoint folder; None for any other name."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the published checkpoints of a run, in the order of their steps."""
    steps = [(parse_step(path), path) for path in checkpoints.glob("step-*")]
    numbered = [(step, path) for step, path in steps if step is not None and is_published(path)]
    return [path for _, path in sorted(numbered)]
