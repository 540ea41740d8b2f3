"""The scale of the loss in float16.

Without one, gradients below 6e-8 are zero in float16. The loss is multiplied by a power of two, and
the gradients are divided by it before anything reads them. If a gradient overflows, the optimizer
skips the step, and the scale halves. It doubles after 2,000 steps without an overflow, as torch's
GradScaler does; but nothing here waits for the device.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Parameter

from ..base.console import say
from ..base.errors import TrainError
from ..model.tensor_shards import local_values

INITIAL, DOUBLES_AFTER = 2.0**16, 2_000
"""The first scale, and the steps without an overflow after which it doubles."""
MANY = 8
"""Skipped steps in a row that are worth a warning."""


class LossScale:
    """The scale of the loss, the same on all ranks; 1 but for float16."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.on, device = accelerator.mixed_precision == "fp16", accelerator.device
        # Not a tensor where there is no scale, so that losses are as they were.
        self.factor: Any = torch.full((), INITIAL, device=device) if self.on else 1
        self._steps = torch.zeros((), dtype=torch.int32, device=device)
        """Steps since the last overflow or doubling."""
        self.skipped = self._in_a_row = 0

    def unscale(self, parameters: Iterable[Parameter]) -> None:
        """Divide gradients by the scale, which is exact."""
        if self.on:
            gradients = [local_values(it.grad) for it in parameters if it.grad is not None]
            torch._foreach_mul_(gradients, 1 / self.factor)

    def update(self, overflowed: Tensor) -> None:
        """Halve the scale after an overflow (1), or double it after many steps without (0)."""
        if self.on:
            torch._amp_update_scale_(self.factor, self._steps, overflowed, 2.0, 0.5, DOUBLES_AFTER)

    def count(self, step: int, scale: float, grad_norm: float) -> dict[str, float]:
        """Count a step whose numbers are read; return its metrics."""
        overflowed = not math.isfinite(grad_norm)
        self.skipped += overflowed
        self._in_a_row = self._in_a_row + 1 if overflowed else 0
        if overflowed and scale <= 1:
            raise TrainError(
                f"step {step}: gradients overflow float16 even without loss scaling; "
                f"{self._in_a_row} steps in a row were skipped. Set model.dtype = "
                '"bfloat16" or "float32", or a lower train.learning_rate'
            )
        if self._in_a_row == MANY:
            say(
                f"warning: step {step}: {MANY} steps in a row are skipped, as gradients overflow "
                f"float16; the loss scale is now {scale / 2:g}"
            )
        return {"loss_scale": scale, "skipped_steps": self.skipped} if self.on else {}

    def state(self) -> dict[str, float]:
        """What checkpoints save: a resumed run scales as if it had never stopped."""
        factor, steps = float(self.factor), int(self._steps)
        return {"scale": factor, "steps": steps, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what a checkpoint saved."""
        if self.on:
            self.factor.fill_(state["scale"])
            self._steps.fill_(state["steps"])
            self.skipped = state["skipped"]
