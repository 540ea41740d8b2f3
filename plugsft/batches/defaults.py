"""The core's answers to the hooks of batches. They need no torch."""

from ..base.types import Build, Feed, Ints, Layouts
from ..hooks import hookimpl
from ..recipe.tables import Train
from .plan import Windows


class BatchDefaults:
    """Examples in their order, batches made one after the other."""

    @hookimpl
    def batches(self, order: Ints, ranks: int, train: Train) -> Layouts:
        """Take `batch_size` examples at a time, in order."""
        return Windows(order, ranks, train)

    @hookimpl
    def feed(self, build: Build, steps: range) -> Feed:
        """Build each window when it is asked for."""
        return map(build, steps)
