"""Open the run of a recipe: check it, prepare its data, connect, load, plan.

Data are prepared before there is a process group, since that may take hours, and since transformers
lets only rank 0 of a group save a model.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..base.errors import LaunchError
from ..base.machine import Machine
from ..batches.defaults import BatchDefaults
from ..data.defaults import DataDefaults
from ..data.prepare import day_of, prepare
from ..model.defaults import ModelDefaults
from ..output.record import Record
from ..ranks.connect import prepare_gpu, silence_libraries, start_watch
from ..ranks.launcher import without_fsdp2
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..run import Run, open_run
from ..tokens.store import Prepared
from .checks import Case, ensure


def open_recipe(
    recipe: Recipe, active: Active, machine: Machine, checkpoints: Sequence[Path] = ()
) -> Run:
    """Open the run of a recipe at step 1, or after the first undamaged one of `checkpoints`."""
    silence_libraries()
    # Plugins that check the recipe ask the GPU, which starts CUDA.
    prepare_gpu(recipe)
    start_watch(machine)
    record = Record(recipe, machine, active)
    active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults(), record)
    return open_run(record, prepare_data(Case(recipe, active, machine), checkpoints), checkpoints)


def prepare_data(case: Case, checkpoints: Sequence[Path]) -> Prepared:
    """Check a recipe and its launch, and turn its rows into tokens.

    A template with a date writes the day on which the run of the checkpoints began, or today.
    """
    if unmet := without_fsdp2(case.recipe, case.machine):
        raise LaunchError(unmet)
    ensure(case, "launcher", "plugins", "model", "weights", "reference")
    begun = checkpoints[0].resolve().parent.parent if checkpoints else None
    data = prepare(case.recipe, case.active, day=day_of(begun))
    for tokens in filter(None, (data.tokens, data.evaluation)):
        ensure(replace(case, tokens=tokens), "tokens")
    return data
