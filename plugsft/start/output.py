"""Lock and check the output folder of a run; find the checkpoints to resume from. No torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from ..base.atomic import damage, is_published, list_checkpoints, sweep
from ..base.console import say
from ..base.errors import CheckpointError, RecipeError
from ..base.limits import read_text
from ..base.machine import Machine
from ..output.folder import (
    describe_results,
    ensure_ours,
    find_run,
    is_finished,
    lock_output,
    results_of,
)
from ..output.same_run import STATE, ensure_same_run
from ..ranks.launcher import watch_launcher
from ..recipe.parse import resolved
from ..recipe.tables import Recipe
from ..registry.active import Active
from .resume import Resume


@contextmanager
def output_folder(
    recipe: Recipe, active: Active, machine: Machine, resume: Resume
) -> Iterator[Sequence[Path] | None]:
    """Lock the output folder for one run; yield the checkpoints to resume from.

    Yields None if the run has finished already.
    """
    watch_launcher()
    with lock_output(recipe) if machine.is_main else nullcontext():
        ensure_ours(recipe.folder)
        if machine.is_main:
            for folder in (recipe.folder, recipe.folder / "checkpoints"):
                sweep(folder)
        checkpoints = checkpoints_to_resume(recipe, active, resume)
        if checkpoints is None:
            yield None
            return
        with active.name_failing_plugin():
            yield checkpoints
    say(f"model: {recipe.folder / 'model'}")
    say(f"report: {recipe.folder / 'report.html'}")


def checkpoints_to_resume(recipe: Recipe, active: Active, resume: Resume) -> Sequence[Path] | None:
    """Return the checkpoints to try, in order; None if the run has finished already."""
    folder, path = recipe.folder, resume.path
    latest = resume.latest
    if path is not None and not is_published(path):
        raise CheckpointError(
            f"--resume-from {path}: is no checkpoint folder{_existing(recipe, path)}"
        )
    if resume.auto:
        if finished_without_checkpoints(recipe):
            _say_finished(recipe)
            return None
        latest = has_checkpoint(recipe)
    own = path is not None and path.resolve().is_relative_to(folder.resolve())
    if not (resume.overwrite or resume.auto or latest or own) and (
        results := describe_results(folder)
    ):
        raise RecipeError(f"output: {recipe.output} holds {results}")
    checkpoints = find_checkpoints(recipe, active, latest, path)
    if latest and is_finished(recipe, checkpoints[0]):
        _say_finished(recipe)
        return None
    return checkpoints


def _say_finished(recipe: Recipe) -> None:
    cure = results_of(recipe.folder)[1]
    say(f"{recipe.output} is finished; nothing to resume. {cure[:1].upper()}{cure[1:]}")


def find_checkpoints(recipe: Recipe, active: Active, resume: bool, path: Path | None) -> list[Path]:
    """Return checkpoints to resume from, the newest first, compared with the recipe."""
    if path is not None:
        checkpoints = [path]
    elif resume:
        folder = recipe.folder / "checkpoints"
        checkpoints = [*reversed(list_checkpoints(folder))]
        if not checkpoints:
            raise CheckpointError(
                f"--resume: there is no checkpoint in {folder}; start without --resume (with "
                "--overwrite if the output holds results), or use --resume-auto"
            )
    else:
        return []
    for checkpoint in checkpoints:
        # Later, each rank compares a share of the other files.
        if damage(checkpoint, names={STATE}) is None:
            ensure_same_run(checkpoint, recipe, active)
            break
    return checkpoints


def _existing(recipe: Recipe, path: Path) -> str:
    """Name the checkpoints that lie in a folder, or in the run's output."""
    places = (path, path / "checkpoints", recipe.folder / "checkpoints")
    paths = next(filter(None, map(list_checkpoints, places)), [])
    names = ", ".join(map(str, paths[-5:]))
    more = f" and {len(paths) - 5:,} earlier ones" if paths[5:] else ""
    return f"; name one of {names}{more}" if paths else "; start without it: there is none"


def option_to_start(recipe: Recipe, active: Active) -> tuple[str, str]:
    """Return the option that a run needs because of earlier results, and what it does."""
    results, _ = results_of(recipe.folder)
    if results and not is_published(recipe.folder / "model"):
        with suppress(CheckpointError):
            newest = find_checkpoints(recipe, active, True, None)[0]
            return "--resume", f"to continue after {newest.name}"
    return ("--overwrite", f"to replace {results}") if results else ("", "")


def has_checkpoint(recipe: Recipe) -> bool:
    """Tell whether there is a checkpoint; raise if it was removed."""
    folder = recipe.folder
    if list_checkpoints(folder / "checkpoints"):
        return True
    run = find_run(folder)
    done = max((line["step"] for line in run.metrics), default=0)
    # A save waits for the one before: after the second one, the first is published.
    if done > 2 * recipe.checkpoint.interval(run.steps.total) > 0:
        raise CheckpointError(
            f"--resume-auto: the run in {folder} reached step {done:,}, and its checkpoints are "
            "missing; restore them, or start again with --overwrite in place of --resume-auto"
        )
    if done:
        say(f"no checkpoint yet: a run ended after step {done:,}; starting again from step 1")
    return False


def finished_without_checkpoints(recipe: Recipe) -> bool:
    """Tell whether the run has finished and its checkpoints are gone."""
    folder = recipe.folder
    if list_checkpoints(folder / "checkpoints") or find_run(folder).status != "completed":
        return False
    results = describe_results(folder)
    with suppress(OSError, ValueError):
        if results and read_text(folder / "recipe.toml") == resolved(recipe):
            return True
    if results:
        raise RecipeError(f"--resume-auto: {recipe.output} holds another recipe's run: {results}")
    return False
