"""The core's answers to the hooks of batches. They need no torch."""

from ..base.types import Build, Ints, Layouts, LoadedSteps
from ..hooks import hookimpl
from ..recipe.tables import Train
from ..tokens.store import Tokens
from .plan import InOrder, shuffle_sources


class BatchDefaults:
    """Shuffle the examples, lay them out in order, and build batches in the loop's process."""

    @hookimpl
    def order_examples(self, tokens: Tokens, epoch: int, seed: int) -> Ints:
        """Shuffle all examples, each as often as the weight of its source says."""
        return shuffle_sources(tokens, seed, epoch)

    @hookimpl
    def plan_batches(self, order: Ints, ranks: int, train: Train) -> Layouts:
        """Take `batch_size` examples at a time, in order."""
        return InOrder(order, ranks, train)

    @hookimpl
    def load_batches(self, build: Build, steps: range) -> LoadedSteps:
        """Build each step's batches when the loop asks for them."""
        return map(build, steps)
