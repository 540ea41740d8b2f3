"""The commands that do a recipe's work: train and prepare."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from .. import loop
from .. import prepare as preparation
from ..answers import DataAnswers
from ..checkpoint import find
from ..console import say
from ..errors import RecipeError
from ..hooks import DATA
from ..machine import look
from ..registry import load
from .places import alone, ensure_inputs, ensure_ours, is_finished, leftovers
from .room import ensure_room


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
    machine, folder = look(), recipe.folder
    if (resume or given) and overwrite:
        raise RecipeError("--resume keeps what --overwrite removes; give one of them")
    ensure_inputs(recipe, path)
    with alone(recipe) if machine.is_main else nullcontext():
        ensure_ours(folder)
        goes_on = resume or (given and given.resolve().is_relative_to(folder.resolve()))
        if not (overwrite or goes_on) and (left := leftovers(folder)):
            raise RecipeError(f"output: {recipe.output} holds {left}")
        ensure_room(recipe, active, overwrite)
        checkpoint = find(recipe, active, resume, given)
        if resume and checkpoint and is_finished(recipe, checkpoint):
            say(f"nothing to resume: {recipe.output} holds {leftovers(folder)}")
            return
        with active.named():
            loop.train(recipe, active, machine, checkpoint)
    say(f"model: {folder / 'model'}")
    say(f"report: {folder / 'report.html'}")


def prepare(path: Path, overrides: Sequence[str], without: Sequence[str]) -> None:
    """Tokenize a recipe's data into its output folder, where training finds it."""
    recipe, active = load(path, overrides, without)
    ensure_inputs(recipe, path)
    if recipe.data.tokens:
        raise RecipeError(
            f"data.tokens: {recipe.data.tokens} is prepared already; leave data.tokens out to "
            "prepare data.source"
        )
    active.answer(DataAnswers(recipe.folder))
    with active.named():
        # A kernel that this machine cannot run is nothing to who prepares data for another.
        loop.ensure_sound(recipe, active, look(), DATA)
        data = preparation.prepare(recipe, active)
    for name, verdict in active.verdicts(DATA).items():
        if verdict != "active":
            say(f"plugin {name}: {verdict}")
    if recipe.model.scratch and not recipe.model.tokenizer:
        say(f"tokenizer: {data.tokenizer_folder}")
    say(f"tokens: {data.tokens.folder}")
