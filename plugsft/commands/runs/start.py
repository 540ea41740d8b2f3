"""Lock and check the output folder of a run; find the checkpoints to resume from. No torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from ...base.atomic import damage, is_published, sweep
from ...base.console import say
from ...base.errors import CheckpointError, RecipeError
from ...base.limits import read_text
from ...base.machine import Machine
from ...base.step_folders import list_checkpoints
from ...output.folder import (
    describe_results,
    ensure_ours,
    is_finished,
    lock_output,
    read_run,
)
from ...output.report import read_metrics
from ...output.same_run import STATE, ensure_same_run
from ...ranks.launcher import watch_launcher
from ...recipe.parse import resolved
from ...recipe.tables import Recipe
from ...registry.active import Active

RESULTS = ("model.*", "checkpoints.*", "run.json.*", "recipe.toml.*", "metrics.jsonl.*")
"""Results that a run writes under a temporary name first."""


@dataclass(frozen=True)
class Resume:
    """Where a run starts: at step 1, or at a checkpoint."""

    latest: bool = False
    auto: bool = False
    """Resume from the latest checkpoint, or start if there is none."""
    path: Path | None = None
    overwrite: bool = False
    """Remove the results of an earlier run, once this one has loaded (Record.open)."""

    def __post_init__(self) -> None:
        if (self.latest or self.path or self.auto) and self.overwrite:
            raise RecipeError("--resume needs what --overwrite removes; choose one of them")
        if self.auto and self.path:
            raise RecipeError("--resume auto takes the latest checkpoint; leave out --resume-from")


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
            sweep(recipe.folder, RESULTS)
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
    if resume.auto:
        if results := finished_without_checkpoints(recipe):
            say(f"nothing to resume: {recipe.output} holds {results}")
            return None
        latest = has_checkpoint(recipe)
    own = path is not None and path.resolve().is_relative_to(folder.resolve())
    if not (resume.overwrite or resume.auto or latest or own) and (
        results := describe_results(folder)
    ):
        raise RecipeError(f"output: {recipe.output} holds {results}")
    checkpoints = find_checkpoints(recipe, active, latest, path)
    if latest and is_finished(recipe, checkpoints[0]):
        say(f"nothing to resume: {recipe.output} holds {describe_results(folder)}")
        return None
    return checkpoints


def find_checkpoints(recipe: Recipe, active: Active, resume: bool, path: Path | None) -> list[Path]:
    """Return checkpoints to resume from, the newest first, compared with the recipe."""
    if path is not None:
        if not is_published(path):
            raise CheckpointError(f"--resume-from {path}: this is no checkpoint folder")
        checkpoints = [path]
    elif resume:
        folder = recipe.folder / "checkpoints"
        checkpoints = [*reversed(list_checkpoints(folder))]
        if not checkpoints:
            raise CheckpointError(
                f"--resume: there is no checkpoint in {folder}; start without --resume (with "
                "--overwrite if the output holds results), or use --resume auto"
            )
    else:
        return []
    for checkpoint in checkpoints:
        # Later, each rank compares a share of the other files.
        if damage(checkpoint, names={STATE}) is None:
            ensure_same_run(checkpoint, recipe, active)
            break
    return checkpoints


def has_checkpoint(recipe: Recipe) -> bool:
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
            "missing; restore them, or start again with --overwrite in place of --resume auto"
        )
    if done:
        say(f"no checkpoint yet: a run ended after step {done:,}; starting again from step 1")
    return False


def finished_without_checkpoints(recipe: Recipe) -> str:
    """Describe a finished run without checkpoints; an empty text if there is none."""
    folder = recipe.folder
    if list_checkpoints(folder / "checkpoints") or read_run(folder).get("status") != "finished":
        return ""
    results = describe_results(folder)
    with suppress(OSError, ValueError):
        if results and read_text(folder / "recipe.toml") == resolved(recipe):
            return results
    if results:
        raise RecipeError(f"--resume auto: {recipe.output} holds another recipe's run: {results}")
    return ""
