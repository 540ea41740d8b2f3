"""Render and tokenize in several processes, each with its own tokenizer and slices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from plugsft import Machine, Shard, ShardWriter, Slice, hookimpl, plugin, state

WORKER_MEMORY = 1 << 30
"""Bytes of memory for each process; it needs about half, however large the data."""
MIN_SLICES = 2
"""Slices per process that make up for its start."""


@plugin()
class MultiprocessTokenize:
    """Render and tokenize in several processes, each with its own tokenizer and slices.

    A worker writes its shards itself and sends only their names and counts. This process
    tokenizes too, and small data alone.
    """

    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of processes, with this one. auto: one per core that the container grants and per GiB
    of memory."""

    machine: Machine = state()
    used: int = state(0)
    """Number of processes that tokenized."""

    @hookimpl
    def check(self, machine: Machine) -> None:
        """Remember the machine."""
        self.machine = machine

    @hookimpl
    def tokenize(self, slices: list[Slice], work: ShardWriter) -> list[Shard] | None:
        """Tokenize slices in this process and in workers; None for small data."""
        from .pool import tokenize_together

        count = self.count_processes(len(slices))
        # More calls follow if another process leaves its slices.
        self.used = max(self.used, count)
        return None if count == 1 else tokenize_together(slices, work, count - 1)

    def count_processes(self, num_slices: int) -> int:
        """Return the number of processes to use."""
        if self.workers != "auto":
            return min(self.workers, num_slices) or 1
        by_memory = self.machine.memory // WORKER_MEMORY
        return max(1, min(self.machine.cores, by_memory, num_slices // MIN_SLICES))

    @hookimpl
    def summary(self) -> str:
        """Report the number of processes."""
        if not self.used:
            return "nothing to tokenize"
        return f"{self.used} processes" if self.used > 1 else "one process: the data is small"
