"""The commands that do a recipe's work: train and prepare."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from .. import loop
from ..base.atomic import sweep
from ..base.console import say
from ..base.errors import CheckpointError, RecipeError
from ..base.limits import read_text
from ..base.machine import look
from ..base.step_folders import list_checkpoints
from ..data import prepare as preparation
from ..data.defaults import DataDefaults
from ..hooks import DATA
from ..model.config import check_ids
from ..output.checkpoint import find
from ..output.disk_space import ensure_room
from ..output.folder import alone, ensure_inputs, ensure_ours, is_finished, leftovers, read_run
from ..output.report import read_metrics
from ..ranks.agree import ending_together
from ..ranks.launcher import watch_launcher
from ..recipe.parse import resolved
from ..recipe.tables import Recipe
from ..registry.active import load

RESULTS = ("model.*", "checkpoints.*", "run.json.*", "recipe.toml.*", "metrics.jsonl.*")
"""Results that a run writes under a temporary name first."""


def train(
    path: Path,
    overrides: Sequence[str],
    without: Sequence[str],
    resume: bool,
    given: Path | None,
    overwrite: bool,
    auto: bool = False,
) -> None:
    """Train a recipe in a folder without another run.

    `auto` resumes from the last checkpoint, or starts if there is none.
    """
    watch_launcher()
    recipe, active = load(path, overrides, without)
    machine, folder = look(), recipe.folder
    if (resume or given or auto) and overwrite:
        raise RecipeError("--resume keeps what --overwrite removes; give one of them")
    if auto and given:
        raise RecipeError("--resume auto takes the latest checkpoint; leave out --resume-from")
    ensure_inputs(recipe, path)
    with alone(recipe) if machine.is_main else nullcontext():
        ensure_ours(folder)
        if machine.is_main:
            sweep(folder, RESULTS)
        if auto:
            if left := finished_alone(recipe):
                say(f"nothing to resume: {recipe.output} holds {left}")
                return
            resume = begun(recipe)
        goes_on = auto or resume or (given and given.resolve().is_relative_to(folder.resolve()))
        if not (overwrite or goes_on) and (left := leftovers(folder)):
            raise RecipeError(f"output: {recipe.output} holds {left}")
        ensure_room(recipe, active, overwrite)
        found = find(recipe, active, resume, given)
        if resume and is_finished(recipe, found[0]):
            say(f"nothing to resume: {recipe.output} holds {leftovers(folder)}")
            return
        with active.name_failing_plugin(), ending_together(recipe.output):
            loop.train(recipe, active, machine, found)
    say(f"model: {folder / 'model'}")
    say(f"report: {folder / 'report.html'}")


def begun(recipe: Recipe) -> bool:
    """Tell whether there is a checkpoint; raise if it was removed."""
    folder = recipe.folder
    if list_checkpoints(folder / "checkpoints"):
        return True
    done = max((line["step"] for line in read_metrics(folder / "metrics.jsonl")), default=0)
    total = (read_run(folder).get("steps") or {}).get("total") or 0
    # A step is logged only after the checkpoint of the step before is published.
    if done > recipe.checkpoint.interval(total) > 0:
        raise CheckpointError(
            f"--resume auto: the run in {folder} reached step {done:,}, and its checkpoints are "
            "gone; bring them back, or start again with --overwrite in place of --resume auto"
        )
    if done:
        say(f"no checkpoint yet: a run ended after step {done:,}; starting again from step 1")
    return False


def finished_alone(recipe: Recipe) -> str:
    """Describe a finished run without checkpoints; an empty text if there is none."""
    folder = recipe.folder
    if list_checkpoints(folder / "checkpoints") or read_run(folder).get("status") != "finished":
        return ""
    left = leftovers(folder)
    with suppress(OSError, ValueError):
        if left and read_text(folder / "recipe.toml") == resolved(recipe):
            return left
    if left:
        raise RecipeError(f"--resume auto: {recipe.output} holds another recipe's run: {left}")
    return ""


def prepare(path: Path, overrides: Sequence[str], without: Sequence[str]) -> None:
    """Tokenize a recipe's data into its output folder, where training finds it."""
    recipe, active = load(path, overrides, without)
    ensure_inputs(recipe, path)
    if recipe.data.tokens:
        raise RecipeError(
            f"data.tokens: {recipe.data.tokens} is prepared already; leave data.tokens out to "
            "prepare data.source"
        )
    active.attach(DataDefaults(recipe.folder))
    with active.name_failing_plugin():
        # A kernel that this machine cannot run is nothing to who prepares data for another.
        loop.ensure_sound(recipe, active, look(), DATA)
        data = preparation.prepare(recipe, active)
        check_ids(recipe, data.largest_id)
    for name, verdict in active.verdicts(DATA).items():
        if verdict != "active":
            say(f"plugin {name}: {verdict}")
    if recipe.model.scratch and not recipe.model.tokenizer:
        say(f"tokenizer: {data.tokenizer_folder}")
    say(f"tokens: {data.tokens.folder}")
