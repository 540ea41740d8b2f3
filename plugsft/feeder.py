"""Windows with their tensors, through the hook that may build them ahead."""

from collections.abc import Callable, Generator
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from .hooks import Hooks
from .tokens import Tokens
from .types import Fed, Window


class Feeder:
    """Builds this rank's batches of each window."""

    def __init__(self, hook: Hooks, accelerator: Accelerator, pad: int) -> None:
        self._hook, self._pad = hook, pad
        self._rank, self._device = accelerator.process_index, accelerator.device

    def feed(
        self, window: Callable[[int], Window], tokens: Tokens, steps: range
    ) -> Generator[Fed, None, None]:
        """Iterate over windows, in order, with their batches on the device."""

        def build(step: int) -> Fed:
            chosen = window(step)
            collated = (
                self._hook.collate(tokens=tokens, examples=examples, pad=self._pad)
                for examples in chosen.layout[self._rank]
            )
            batches = [
                {name: self._there(value) for name, value in batch.items()} for batch in collated
            ]
            return Fed(chosen, batches)

        # Closing this closes what the hook gave, if that can be closed.
        yield from self._hook.feed(build=build, steps=steps)

    def _there(self, value: Any) -> Any:
        return value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value
