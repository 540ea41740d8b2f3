"""The core's answers to the hooks of batches. They need no torch."""

from ..base.types import Build, Ints, Layouts, LoadedSteps
from ..hooks import hookimpl
from ..recipe.tables import Train
from .plan import InOrder


class BatchDefaults:
    """Lay out examples in their order, and build batches in the loop's process."""

    @hookimpl
    def plan_batches(self, order: Ints, ranks: int, train: Train) -> Layouts:
        """Take `batch_size` examples at a time, in order."""
        return InOrder(order, ranks, train)

    @hookimpl
    def load_batches(self, build: Build, steps: range) -> LoadedSteps:
        """Build each step's batches when the loop asks for them."""
        return map(build, steps)
