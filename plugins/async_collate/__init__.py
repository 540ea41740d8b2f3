"""Build the next windows in a thread while one trains: sliced, collated, copied to the device."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from plugsft import Build, Fed, Feed, hookimpl, plugin, state

PATIENCE = 10.0
"""Seconds to wait at the end for a window that is still being built; nobody wants it any more."""


@plugin()
class AsyncCollate:
    """Build the next windows in a thread while one trains: sliced, collated, copied to the device.

    The loop gets the same windows in the same order, in evaluation too.
    """

    depth: Annotated[int, Field(ge=1, le=64)] = 1
    """Windows to be ahead of the one that trains; each takes the memory of its batches."""

    windows: int = state(0)
    built: float = state(0.0)
    """Seconds that the thread took to build them."""
    waited: float = state(0.0)
    """Seconds of these that the loop stood still."""

    @hookimpl
    def feed(self, build: Build, steps: range) -> Feed:
        """Have windows built ahead of the loop."""
        return self._windows(build, steps)

    def _windows(self, build: Build, steps: range) -> Iterator[Fed]:
        from .ahead import Ahead  # it imports torch

        ahead, patience = Ahead(build, steps, self.depth), PATIENCE
        try:
            for step in steps:
                yield ahead.take(step)
        except KeyboardInterrupt:
            patience = 0.0
            raise
        finally:
            ahead.close(patience)
            self.windows += ahead.taken
            self.built += ahead.built
            self.waited += ahead.waited

    @hookimpl
    def verdict(self) -> str | None:
        """Say how much of the building the loop noticed."""
        if not self.windows:
            return None
        ahead = f"{self.depth} window{'s' * (self.depth > 1)} ahead"
        return (
            f"up to {ahead}: {self.windows:,} windows took {self.built:.2f} s to build, for which "
            f"the loop stood still for {self.waited:.2f} s"
        )
