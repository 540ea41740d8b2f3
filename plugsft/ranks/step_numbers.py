"""Numbers of a step: summed over ranks on the device, and read on the host later."""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
import xxhash
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..batches.labels import buffer
from .agree import ensure_alike

MOST_METRICS = 240
"""Most metrics of plugins in a step."""
NUMBERS = MOST_METRICS + 16
"""Numbers in the reduction of a step; the others are the core's."""
SCALE, NORM = -2, -1
"""Places of the loss scale and of the gradient norm, which are not summed."""
SAME_CALLS = "'order_examples', 'plan_batches' and 'add_metrics' give the same on all ranks"


class Numbers:
    """A loss and other numbers, summed over all ranks; only `read` waits for the device."""

    @torch.no_grad()
    def __init__(
        self,
        accelerator: Accelerator,
        losses: list[Tensor],
        others: Mapping[str, Any],
        facts: Mapping[str, str],
    ) -> None:
        """Begin the reduction; `facts` must be the same on all ranks."""
        self._accelerator, self._facts = accelerator, facts
        self._checksum = xxhash.xxh32_intdigest(repr(facts).encode()) % 2**24  # exact in float32
        others = {"checksum": self._checksum, **others}
        loss = torch.stack(losses)
        # Counts need float64, which Apple's GPUs do not have.
        loss = loss.to(torch.float32 if loss.device.type == "mps" else torch.float64).sum()
        values = [loss, *others.values()]
        # Its size is the same on all ranks, even if their numbers are not.
        self._host = buffer((NUMBERS,), loss.dtype).zero_()
        plain = [0 if isinstance(value, Tensor) else value for value in values]
        self._host.numpy()[: len(values)] = plain
        local = self._host.to(loss.device, non_blocking=True)
        for place, value in enumerate(values):
            if isinstance(value, Tensor):
                local[place].copy_(value.reshape(()), non_blocking=True)
        self._sums: Tensor = accelerator.reduce(local, reduction="sum")
        self._names = ["loss", *others]
        self._copied: torch.cuda.Event | None = None

    def send(self, grad_norm: Tensor | float | None = None, scale: Tensor | float = 1) -> Self:
        """Begin the copy to the host, with norm and scale, which are the same on all ranks."""
        whole = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        # Assigned to one place in place of a slice, a tensor would make the host wait.
        self._sums[NORM:] = math.nan if whole is None else whole
        self._sums[SCALE].fill_(scale)
        self._host.copy_(self._sums, non_blocking=self._sums.is_cuda)
        if self._sums.is_cuda:
            self._copied = torch.cuda.current_stream().record_event()
        return self

    def are_broken(self) -> Tensor:
        """1 if the loss or the gradient norm is not finite, else 0; the host does not wait."""
        # 0 times a number that is not finite is not a number.
        return (0 * (self._sums[0] + self._sums[NORM])).isnan().float()

    def read(self, compare: bool = True) -> dict[str, float]:
        """Wait for the copy; return the numbers by name, with "grad_norm" and "loss_scale".

        If the checksums differ, ranks compare their facts; without `compare`, they do not, since
        they may be elsewhere.
        """
        if self._copied:
            self._copied.synchronize()
        *values, scale, grad_norm = self._host.tolist()
        numbers = dict(zip(self._names, values, strict=False))
        numbers |= {"grad_norm": grad_norm, "loss_scale": scale}
        expected = self._checksum * self._accelerator.num_processes
        if numbers.pop("checksum") != expected and compare:
            ensure_alike(self._facts, SAME_CALLS)
        return numbers


def can_skip_steps(optimizer: Optimizer) -> bool:
    """Whether an optimizer skips a step by its attribute `found_inf`: torch's fused ones."""
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and all(group.get("fused") for group in optimizer.param_groups)
