"""Train a loaded recipe, and warn of what its author may not mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.console import say
from ..base.errors import PlugsftError, RecipeError, reason_of
from ..recipe.capabilities import Capability

if TYPE_CHECKING:
    from ..output.record import Record
    from ..recipe.tables import Recipe
    from ..registry.active import Active


@dataclass(frozen=True)
class Start:
    """Where a run starts: at step 1, or at a checkpoint."""

    latest: bool = False
    auto: bool = False
    """Resume from the latest checkpoint, or start if there is none."""
    path: Path | None = None
    overwrite: bool = False
    """Remove the results of an earlier run, once this one has loaded (Record.open)."""

    def ensure_possible(self) -> None:
        """Refuse options that contradict each other."""
        if (self.latest or self.path or self.auto) and self.overwrite:
            raise RecipeError("--resume needs what --overwrite removes; choose one of them")
        if self.auto and self.path:
            raise RecipeError("--resume-auto takes the latest checkpoint; leave out --resume-from")


def train_recipe(recipe: Recipe, active: Active, path: Path, start: Start) -> None:
    """Train a loaded recipe, as the command and `plugsft.api.train` do."""
    # A mistake in the recipe is reported before numpy and Arrow are imported.
    from ..base.machine import look
    from .before_run import output_folder
    from .checks import Case, ensure

    machine = look()
    ensure(Case(recipe, active, machine, path), "nothing")
    start.ensure_possible()
    with output_folder(recipe, active, machine, start) as checkpoints:
        if checkpoints is None:
            return
        # Wrong paths, and an output that holds results, are refused before torch is imported.
        from .. import loop
        from ..output.disk_space import ensure_room
        from ..ranks.agree import ending_together
        from .guards import police
        from .open import open_recipe

        ensure_room(recipe, active, start.overwrite)
        for warning in warnings_of(recipe, machine.world_size):
            say(f"warning: {warning}")
        police(active)
        with ending_together(recipe.output):
            opened = open_recipe(recipe, active, machine, checkpoints)
            try:
                loop.train(opened)
            finally:
                write_report(opened.record)


def write_report(record: Record) -> None:
    """Write run.json and its page; an error here must not hide how the run ended."""
    from ..output import report

    if not record.begun:
        return
    try:
        record.write()
        report.write(record.folder)
    except (OSError, PlugsftError) as error:
        say(f"warning: no report: {reason_of(error)}")


def warnings_of(recipe: Recipe, ranks: int) -> Iterator[str]:
    """Yield what a recipe does that its author may not mean."""
    train, share = recipe.train, recipe.train.batch_size // ranks
    packs = recipe.provides("packed_rows")
    if share > 1 and "micro_batch" not in train.model_fields_set and not packs:
        yield (
            "the model computes one example at a time, which is slow. Add "
            f"{Capability.bundled('packed_rows').table}, or set train.micro_batch = "
            f"{min(8, share)} (1 if you mean it)"
        )
    if train.learning_rate == 0:
        yield "train.learning_rate = 0 trains nothing; recipes take about 1e-5, with adapters 1e-4"
    elif train.learning_rate < 1e-5 and recipe.provides("adapters"):
        yield (
            f"train.learning_rate = {train.learning_rate:g} is far below what adapters take: about "
            "1e-4"
        )
    if train.learning_rate > 1:
        yield (
            f"train.learning_rate = {train.learning_rate} is far above what recipes take: about "
            "1e-5, with adapters 1e-4"
        )
