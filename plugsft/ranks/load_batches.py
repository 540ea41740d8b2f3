"""Windows with their tensors, through the hook that may build them ahead."""

import time
from collections.abc import Callable, Generator, Sequence

from accelerate import Accelerator
from torch import Tensor

from ..base.types import Batch, Fed, Ints, Window
from ..hooks import Hooks
from ..tokens.store import Tokens
from .agree import agreed

NAMED = 20
"""Most rows that a message names."""


def rows_of(tokens: Tokens, parts: Sequence[Ints]) -> str:
    """Name the rows of some micro-batches: "chats.jsonl:3, chats.jsonl:17"."""
    examples = [int(number) for part in parts for number in part]
    rows = [tokens.source_of(number) for number in examples[:NAMED]]
    named = [f"{tokens.facts['sources'][source]['name']}:{row}" for source, row in rows]
    more = f" and {len(examples) - NAMED} more" if len(examples) > NAMED else ""
    return (", ".join(named) or "no row") + more


class Feeder:
    """Builds this rank's batches of each window."""

    def __init__(self, hook: Hooks, accelerator: Accelerator, pad: int) -> None:
        self._accelerator, self._hook, self._pad = accelerator, hook, pad
        self._rank, self._device = accelerator.process_index, accelerator.device

    def feed(
        self, window: Callable[[int], Window], tokens: Tokens, steps: range
    ) -> Generator[Fed, None, None]:
        """Iterate over windows, in order, with their batches on the device.

        A window is yielded once all ranks have made their batches, or all ranks raise.
        """

        def build(step: int) -> Fed:
            making: list[Ints] = []
            try:
                chosen, made = window(step), []
                for part in chosen.layout[self._rank]:
                    making = [part]
                    made.append(self.collate(tokens, part))
                started, making = time.perf_counter(), []
                batches = [self.copied(batch) for batch in made]
                return Fed(chosen, batches, time.perf_counter() - started)
            except Exception as error:
                note = f"as rank {self._rank} made the batches of step {step}"
                error.add_note(f"{note}, from {rows_of(tokens, making)}" if making else note)
                raise

        fed: Fed | None
        windows = iter(self._hook.feed(build=build, steps=steps))
        try:
            while True:
                with agreed(self._accelerator, "making batches"):
                    fed = next(windows, None)
                if fed is None:
                    return
                yield fed
        finally:
            if isinstance(windows, Generator):
                windows.close()

    def batch(self, tokens: Tokens, examples: Ints) -> Batch:
        """Return a micro-batch of some examples, on the device."""
        return self.copied(self.collate(tokens, examples))

    def collate(self, tokens: Tokens, examples: Ints) -> Batch:
        """Return a micro-batch of some examples, on the host."""
        return self._hook.collate(tokens=tokens, examples=examples, pad=self._pad)

    def copied(self, batch: Batch) -> Batch:
        """Return a micro-batch on the device."""
        return {
            name: one.to(self._device, non_blocking=True) if isinstance(one, Tensor) else one
            for name, one in batch.items()
        }
