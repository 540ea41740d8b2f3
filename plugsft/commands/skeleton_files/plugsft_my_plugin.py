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
    """Tokens, padding included, from which on a micro-batch counts as long."""

    seen: int = state(0)
    long: int = state(0)

    @hookimpl(wrapper=True)
    def step(self, batch: Batch) -> Generator[None, Tensor, Tensor]:
        """Look at each micro-batch on its way through the model."""
        self.seen += 1
        self.long += batch["input_ids"].shape[1] > self.longer_than
        loss = yield  # here the core, or another plugin, computes the loss
        return loss

    @hookimpl
    def verdict(self) -> str | None:
        """Say what came of it, once there is something to say."""
        if not self.seen:
            return None
        return f"{self.long} of {self.seen} micro-batches longer than {self.longer_than} tokens"
