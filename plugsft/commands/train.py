"""The commands that do a recipe's work: train and prepare."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from .. import loop
from .. import prepare as preparation
from ..answers import DataAnswers
from ..checkpoint import listed
from ..console import say
from ..errors import RecipeError
from ..machine import look
from ..publish import discard, is_published, writing
from ..recipe import Recipe
from ..registry import load


def train(
    path: Path,
    overrides: Sequence[str],
    without: Sequence[str],
    resume: bool,
    given: Path | None,
    overwrite: bool,
) -> None:
    """Train a recipe, in a folder that holds no other run."""
    recipe, active = load(path, overrides, without)
    machine = look()
    if (resume or given) and overwrite:
        raise RecipeError("--resume keeps what --overwrite removes; give one of them")
    with alone(recipe) if machine.is_main else nullcontext():
        if overwrite and machine.is_main:
            clear(recipe)
        elif not (resume or given or overwrite):
            refuse_leftovers(recipe)
        loop.train(recipe, active, machine, resume, given)
    say(f"model: {recipe.folder / 'model'}")
    say(f"report: {recipe.folder / 'report.html'}")


def prepare(path: Path, overrides: Sequence[str], without: Sequence[str]) -> None:
    """Tokenize a recipe's data into its output folder, where training finds it."""
    recipe, active = load(path, overrides, without)
    active.answer(DataAnswers(recipe.folder))
    loop.ensure_sound(recipe, active, look())
    _, tokens, _ = preparation.prepare(recipe, active)
    say(f"tokens: {tokens.folder}")


@contextmanager
def alone(recipe: Recipe) -> Iterator[None]:
    """Hold the output folder: a second run that writes into it would spoil both."""
    with writing(recipe.folder):
        recipe.folder.mkdir(parents=True, exist_ok=True)
        lock = (recipe.folder / ".lock").open("a")
    with lock:
        try:
            # The system lets go of it when we end, however we end.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(
                f"output: another run is writing into {recipe.output}; wait for its end, or give "
                "another folder (output=...)"
            ) from None
        except OSError:
            say(f"warning: {recipe.output} is on a file system without locks; keep other runs out")
        try:
            yield
        finally:
            if os.listdir(recipe.folder) == [".lock"]:
                # The recipe was refused: nothing stays behind.
                shutil.rmtree(recipe.folder)


def refuse_leftovers(recipe: Recipe) -> None:
    """Refuse to start anew over an earlier run's checkpoints or model."""
    kept = listed(recipe.folder / "checkpoints")
    if is_published(recipe.folder / "model"):
        what = "a finished run's model"
    elif kept:
        what = f"checkpoints up to {kept[-1].name}"
    else:
        return
    raise RecipeError(
        f"output: {recipe.output} holds {what}: go on with --resume, start anew with --overwrite, "
        "or give another folder (output=...)"
    )


def clear(recipe: Recipe) -> None:
    """Remove an earlier run's results; its prepared data may serve again, and stays."""
    for name in ("checkpoints", "model"):
        discard(recipe.folder / name)
    for name in ("metrics.jsonl", "run.json", "report.html", "recipe.toml"):
        (recipe.folder / name).unlink(missing_ok=True)
