"""Count the micro-batches that are long."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from plugsft import Batch, hookimpl, plugin, state

if TYPE_CHECKING:
    from torch import Tensor


@plugin()
class MyPlugin:
    """Count the micro-batches that are long."""

    longer_than: int = 128
    """A micro-batch with more tokens than this, padding included, is long."""

    seen: int = state(0)
    long: int = state(0)

    @hookimpl(wrapper=True)
    def step(self, batch: Batch) -> Generator[None, Tensor, Tensor]:
        """Count each micro-batch before its loss is computed."""
        self.seen += 1
        self.long += batch["input_ids"].shape[1] > self.longer_than
        loss = yield  # the core, or another plugin, computes the loss
        return loss

    @hookimpl
    def summary(self) -> str | None:
        """Report the counts, after the first micro-batch."""
        if not self.seen:
            return None
        return f"{self.long} of {self.seen} micro-batches longer than {self.longer_than} tokens"
