"""The commands that do a recipe's work: train and prepare."""

from collections.abc import Sequence
from pathlib import Path

from .. import loop
from .. import prepare as preparation
from ..answers import DataAnswers
from ..checkpoint import listed
from ..console import say
from ..errors import RecipeError
from ..machine import look
from ..publish import discard, is_published
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
