"""Numbers of a step: summed over ranks on the device, and read on the host later."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..batches.labels import buffer
from ..registry.contracts import MOST_METRICS, CountOf
from .agree import ensure_alike

NUMBERS = 2 * MOST_METRICS + 16
"""Numbers in the reduction of a step: metrics of plugins with their counts, and the core's."""
SAME_CALLS = "'order_examples', 'plan_batches' and 'add_metrics' give the same on all ranks"


class Numbers:
    """A loss and other numbers, summed over all ranks; only `read` waits for the device."""

    @torch.no_grad()
    def __init__(
        self,
        accelerator: Accelerator,
        losses: list[Tensor],
        others: Mapping[Any, Any],
        facts: Mapping[str, str],
    ) -> None:
        """Begin the reduction; `facts` must be the same on all ranks."""
        self._accelerator, self._facts = accelerator, facts
        self._checksum = xxhash.xxh32_intdigest(repr(facts).encode()) % 2**24  # exact in float32
        loss = torch.stack(losses)
        # Counts need float64, which Apple's GPUs do not have.
        loss = loss.to(torch.float32 if loss.device.type == "mps" else torch.float64).sum()
        values = [loss, self._checksum, *others.values()]
        # Its size is the same on all ranks, even if their numbers are not.
        self._host = buffer((NUMBERS,), loss.dtype).zero_()
        plain = [0 if isinstance(value, Tensor) else value for value in values]
        self._host.numpy()[: len(values)] = plain
        local = self._host.to(loss.device, non_blocking=True)
        for place, value in enumerate(values):
            if isinstance(value, Tensor):
                local[place].copy_(value.reshape(()), non_blocking=True)
        self._sums: Tensor = accelerator.reduce(local, reduction="sum")
        self._names: list[Any] = ["loss", None, *others]  # no metric has the checksum's name
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def add(self, **equal: Tensor | float | None) -> None:
        """Add numbers that all ranks have alike; None stands for no number."""
        for name, value in equal.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            place = self._sums[len(self._names)]
            if isinstance(whole, Tensor):
                place.copy_(whole.reshape(()), non_blocking=True)
            else:
                place.fill_(math.nan if whole is None else whole)
            self._names.append(name)

    def send(self) -> None:
        """Begin the copy to the host."""
        self._host.copy_(self._sums, non_blocking=self._sums.is_cuda)
        if self._sums.is_cuda:
            self._copied = torch.cuda.current_stream().record_event()

    def are_broken(self) -> Tensor:
        """1 if the loss or the gradient norm is not finite, else 0; the host does not wait."""
        loss, grad_norm = self._sums[0], self._sums[self._names.index("grad_norm")]
        zero = 0 * (loss + grad_norm)  # not a number, if one of them is not finite
        return zero.isnan().float()

    def read(self, compare: bool = True) -> dict[Any, float]:
        """Wait for the copy; return the numbers by name.

        If the checksums differ, ranks compare their facts; without `compare`, they do not, since
        they may be elsewhere.
        """
        if self._copied:
            self._copied.synchronize()
        numbers = dict(zip(self._names, self._host.tolist(), strict=False))
        alike = numbers.pop(None) == self._checksum * self._accelerator.num_processes
        if compare and not alike:
            ensure_alike(self._facts, SAME_CALLS)
        return numbers


def means_of(sums: Mapping[Any, float], denominator: float) -> dict[str, float]:
    """Divide the sums of plugins' metrics by their own counts, or by the denominator."""
    means = {}
    for name, total in sums.items():
        if isinstance(name, str):
            count = sums.get(CountOf(name), denominator)
            means[name] = total / count if count else math.nan
    return means


def can_skip_steps(optimizer: Optimizer) -> bool:
    """Whether an optimizer skips a step by its attribute `found_inf`: torch's fused ones."""
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and all(group.get("fused") for group in optimizer.param_groups)
