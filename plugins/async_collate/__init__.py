"""Build the batches of the next steps in a thread: sliced, collated, copied to the device."""

from collections.abc import Callable, Iterator
from typing import Annotated

from pydantic import Field

from plugsft import LoadedStep, hookimpl, plugin, state

PATIENCE = 10.0
"""Seconds to wait at the end for batches that are being built, and are no longer needed."""


@plugin(provides={"batches_ahead": "depth"})
class AsyncCollate:
    """Build the batches of the next steps in a thread: sliced, collated, copied to the device.

    The loop gets the same batches in the same order, in evaluation too.
    """

    depth: Annotated[int, Field(ge=1, le=64)] = 1
    """Steps to build ahead of the loop; each takes the memory of its batches."""

    steps: int = state(0)
    built: float = state(0.0)
    """Seconds that the thread took to build the batches."""
    waited: float = state(0.0)
    """Seconds that the loop waited for them."""

    @hookimpl
    def load_batches(
        self, build: Callable[[int], LoadedStep], steps: range
    ) -> Iterator[LoadedStep]:
        """Build batches ahead of the loop."""
        return self._build_ahead(build, steps)

    def _build_ahead(
        self, build: Callable[[int], LoadedStep], steps: range
    ) -> Iterator[LoadedStep]:
        from .ahead import Ahead

        ahead, patience = Ahead(build, steps, self.depth), PATIENCE
        try:
            for _ in steps:
                yield ahead.take()
        except KeyboardInterrupt:
            patience = 0.0
            raise
        finally:
            ahead.close(patience)
            self.steps += ahead.taken
            self.built += ahead.built
            self.waited += ahead.waited

    @hookimpl
    def summary(self) -> str | None:
        """Report the time that building took, and the time that the loop waited."""
        if not self.steps:
            return None
        ahead = f"{self.depth} step{'s' * (self.depth > 1)} ahead"
        return (
            f"up to {ahead}: the batches of {self.steps:,} steps took {self.built:.2f} s to build; "
            f"the loop waited {self.waited:.2f} s"
        )
