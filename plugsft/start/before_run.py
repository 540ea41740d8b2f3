"""The output folder of a run: locked, and searched for checkpoints to resume from."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.atomic import (
    is_published,
    list_checkpoints,
    parse_step,
    read_manifest,
    stamp,
    sweep,
)
from ..base.console import say
from ..base.errors import CheckpointError, RecipeError
from ..base.machine import Machine
from ..checkpoint.same_run import STATE, ensure_same_run, own_keys
from ..output.folder import (
    describe_results,
    find_run,
    lock_output,
    read_recipe,
    results_of,
)
from ..ranks.launcher import LAUNCHER_ENDED, by_accelerate
from ..recipe.parse import anchored, changed, defaults_of, flatten
from ..recipe.tables import Recipe
from ..registry.active import Active

if TYPE_CHECKING:
    from .train import Start

PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h: the signal that this process gets when its parent ends."""


@contextmanager
def output_folder(
    recipe: Recipe, active: Active, machine: Machine, start: Start
) -> Iterator[Sequence[Path] | None]:
    """Lock the output folder for one run; yield the checkpoints to resume from.

    Yields None if the run has finished already.
    """
    watch_launcher()
    with lock_output(recipe) if machine.is_main else nullcontext():
        if machine.is_main:
            for folder in (recipe.folder, recipe.folder / "checkpoints"):
                sweep(folder)
        checkpoints = checkpoints_to_resume(recipe, active, start)
        yield checkpoints
    if checkpoints is not None:
        say(f"model: {recipe.folder / 'model'}")
        say(f"report: {recipe.folder / 'report.html'}")


def checkpoints_to_resume(recipe: Recipe, active: Active, start: Start) -> Sequence[Path] | None:
    """Find the checkpoints to try, in order; None if the run has finished already."""
    folder, path = recipe.folder, start.path
    if path is not None and not is_published(path):
        raise CheckpointError(
            f"--resume-from {path}: is no checkpoint folder{_existing(recipe, path)}"
        )
    if start.auto and not list_checkpoints(folder / "checkpoints") and is_finished(recipe):
        return None
    latest = start.latest or (start.auto and has_checkpoint(recipe))
    own = path is not None and path.resolve().is_relative_to(folder.resolve())
    if not (start.overwrite or start.auto or latest or own) and (
        results := describe_results(folder)
    ):
        raise RecipeError(f"output: {recipe.output} holds {results}")
    checkpoints = find_checkpoints(recipe, active, latest, path)
    if latest and is_finished(recipe, parse_step(checkpoints[0])):
        return None
    return checkpoints


def is_finished(recipe: Recipe, step: int | None = None) -> bool:
    """Whether the run has finished, with the checkpoint of `step`; then say so.

    Refuses another recipe's run.
    """
    folder, run = recipe.folder, find_run(recipe.folder)
    if run.status != "completed" or not is_published(folder / "model"):
        return False
    if step not in (None, run.steps.total):
        return False
    then, now = (
        own_keys(tables) | flatten({"plugins": tables.get("plugins", {})})
        for tables in (read_recipe(folder), anchored(recipe))
    )
    then = defaults_of(now) | then  # a key that is newer than the run had its default
    if differing := [key for key in changed(then, now) if key != "plugins"]:
        raise RecipeError(
            f"output: {recipe.output} holds another recipe's finished run: {', '.join(differing)} "
            "changed since; undo that, or give another output"
        )
    cure = results_of(folder)[1]
    say(f"{recipe.output} is finished; nothing to resume. {cure[:1].upper()}{cure[1:]}")
    return True


def find_checkpoints(recipe: Recipe, active: Active, resume: bool, path: Path | None) -> list[Path]:
    """Find checkpoints to resume from, the newest first; one must be of this recipe."""
    if path is not None:
        checkpoints = [path]
    elif resume:
        folder = recipe.folder / "checkpoints"
        checkpoints = list_checkpoints(folder)[::-1]
        if not checkpoints:
            raise CheckpointError(
                f"--resume: there is no checkpoint in {folder}; start without --resume (with "
                "--overwrite if the output holds results), or use --resume-auto"
            )
    else:
        return []
    # Later, each rank compares a share of the other files: there may be thousands.
    if whole := next(filter(has_whole_state, checkpoints), None):
        ensure_same_run(whole, recipe, active)
    return checkpoints


def has_whole_state(checkpoint: Path) -> bool:
    """Whether a checkpoint's state.json is as it was written."""
    state = checkpoint / STATE
    with suppress(OSError, ValueError, LookupError):
        return read_manifest(checkpoint)[state] == stamp(state)
    return False


def _existing(recipe: Recipe, path: Path) -> str:
    """Name the checkpoints that lie in a folder, or in the run's output."""
    places = (path, path / "checkpoints", recipe.folder / "checkpoints")
    paths = next(filter(None, map(list_checkpoints, places)), [])
    names = ", ".join(map(str, paths[-5:]))
    return f"; name one of {names}" if paths else "; start without it: there is none"


def option_to_start(recipe: Recipe, active: Active) -> tuple[str, str]:
    """Choose the option that a run needs because of earlier results, and say what it does."""
    results, _ = results_of(recipe.folder)
    if results and not is_published(recipe.folder / "model"):
        with suppress(CheckpointError):
            newest = find_checkpoints(recipe, active, True, None)[0]
            return "--resume", f"to continue after {newest.name}"
    return ("--overwrite", f"to replace {results}") if results else ("", "")


def has_checkpoint(recipe: Recipe) -> bool:
    """Whether there is a checkpoint; one that was removed is never replaced in silence."""
    folder = recipe.folder
    if list_checkpoints(folder / "checkpoints"):
        return True
    run = find_run(folder)
    done = max((line["step"] for line in run.metrics), default=0)
    # A save waits for the one before: after the second one, the first is published.
    every = recipe.checkpoint.interval(run.steps.total, run.steps.per_epoch)
    if done > 2 * every > 0:
        raise CheckpointError(
            f"--resume-auto: the run in {folder} reached step {done:,}, and its checkpoints are "
            "missing; restore them, or start again with --overwrite in place of --resume-auto"
        )
    if done:
        say(f"no checkpoint yet: a run ended after step {done:,}; starting again from step 1")
    return False


def watch_launcher() -> None:
    """End this process in order when its launcher dies: nobody else would end it.

    Processes without a launcher, such as a shell's background jobs, are not watched: they go on
    when their shell ends.
    """
    if by_accelerate() or "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LAUNCHER_ENDED)
        if os.getppid() != launcher:  # it ended a moment ago
            os.kill(os.getpid(), LAUNCHER_ENDED)
