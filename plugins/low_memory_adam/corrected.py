"""AdamW of bfloat16 weights and moments, rounded up or down at random.

A value between two bfloat16 numbers becomes the upper one with a probability of its distance from
the lower one. So its expectation is exact, and steps smaller than the distance add up.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plugsft.kit import shard_of

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Weights that are updated at a time, which bounds the float32 values in between."""
ROUNDED = 16
"""Bits of a float32 that bfloat16 does not have."""
MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64)
"""Odd numbers that spread the bits of a position over all 64."""


class CorrectedAdamW(Optimizer):
    """AdamW whose bfloat16 weights and moments are exact on average."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights."""
        number = 0
        for group in self.param_groups:
            scalars = cache(partial(scalars_of, group))  # one copy to the device for a group
            for weight in group["params"]:
                number += 1
                if weight.grad is not None:
                    self._update(weight, weight.grad, scalars, number)

    def _update(
        self, weight: Tensor, grad: Tensor, scalars: Callable[..., Tensor], number: int
    ) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        tensors = [weight, grad.contiguous(), state["exp_avg"], state["exp_avg_sq"]]
        shards = [shard_of(tensor) for tensor in tensors]
        device = shards[0].values.device
        numbers, key = scalars(state["step"], device), hash_of(self.seed, state["step"], number)
        update, size = _update_for(device.type), CHUNK.get(device.type, CHUNK["cpu"])
        for offset in range(0, shards[0].values.numel(), size):
            chunk = slice(offset, offset + size)
            first = torch.tensor([shards[0].start + offset, key]).to(device, non_blocking=True)
            update(*(shard.values[chunk] for shard in shards), numbers, first)


def scalars_of(group: dict[str, Any], step: int, device: torch.device) -> Tensor:
    """Return the numbers of a group's update at a step, on the device."""
    beta1, beta2 = group["betas"]
    numbers = [
        float(group["lr"]),
        group["weight_decay"],
        beta1,
        beta2,
        group["eps"],
        1 - beta1**step,
        1 - beta2**step,
    ]
    return torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)


def update_chunk(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    first: Tensor,
) -> None:
    """Update a chunk in place; `first` has the position of its first element, and a key."""
    lr, decay, beta1, beta2, eps, correction1, correction2 = scalars.unbind()
    gradient = grad.float()
    mean = exp_avg.float().lerp(gradient, 1 - beta1)
    square = exp_avg_sq.float().lerp(gradient.square(), 1 - beta2)
    denominator = (square / correction2).sqrt() + eps
    updated = weight.float() * (1 - lr * decay) - lr * (mean / correction1) / denominator
    bits = random_bits(first[0] + torch.arange(len(weight), device=weight.device), first[1])
    for number, (target, values) in enumerate(
        [(weight, updated), (exp_avg, mean), (exp_avg_sq, square)]
    ):
        rounds = target.dtype == torch.bfloat16
        target.copy_(round_at_random(values, bits >> number * ROUNDED) if rounds else values)


def round_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16: up or down, by the lowest 16 of the random bits."""
    mask = (1 << ROUNDED) - 1
    rounded = (values.view(torch.int32) + (bits & mask).int()) & ~mask
    return torch.where(values.isfinite(), rounded.view(torch.float32), values).bfloat16()


def random_bits(positions: Tensor, key: Tensor) -> Tensor:
    """Return 64 random bits for each position of a weight, the same on every machine."""
    bits = positions * MIX[0] + key
    bits = (bits ^ (bits >> 32)) * MIX[1]
    return bits ^ (bits >> 32)


def hash_of(*numbers: int) -> int:
    """Return a whole number of 63 bits from others."""
    value = 0
    for number in numbers:
        value = (value ^ number) * 0xD6E8FEB86659FD93 % (1 << 64)
        value ^= value >> 32
    return value >> 1


@cache
def _update_for(device: str) -> Callable[..., None]:
    """Return the update: on a GPU one compiled kernel reads and writes each value once."""
    return torch.compile(update_chunk, dynamic=True) if device == "cuda" else update_chunk
