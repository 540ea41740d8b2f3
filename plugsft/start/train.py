"""Train a loaded recipe, as the command and `plugsft.api.train` do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..base.console import say
from .resume import Resume

if TYPE_CHECKING:
    from ..recipe.tables import Recipe
    from ..registry.active import Active


def train_recipe(recipe: Recipe, active: Active, path: Path, start: Resume) -> None:
    """Train a loaded recipe, as the command and `plugsft.api.train` do."""
    # A mistake in the recipe is reported before numpy and Arrow are imported.
    from ..base.machine import look
    from .before_run import check_inputs, output_folder, warnings_of

    check_inputs(recipe, active, path)
    start.ensure_possible()
    machine = look()
    with output_folder(recipe, active, machine, start) as checkpoints:
        if checkpoints is None:
            return
        # What is wrong with recipe, inputs or output is reported before torch is imported.
        from .. import loop, run
        from ..output.disk_space import ensure_room
        from ..ranks.agree import ending_together

        ensure_room(recipe, active, start.overwrite)
        for warning in warnings_of(recipe, machine.world_size):
            say(f"warning: {warning}")
        with ending_together(recipe.output):
            loop.train(run.open(recipe, active, machine, checkpoints))
