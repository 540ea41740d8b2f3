"""The loss from hidden states in chunks: no tensor holds all logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NONE = (False, False, False)


@dataclass(frozen=True)
class LogitTransform:
    """A model's transform of its head's output: x -> cap * tanh(slope * x / cap)."""

    slope: float = 1.0
    cap: float | None = None

    PROBES: ClassVar = (0.0, 2.0**-10, -(2.0**-10), 0.75, -3.0, 20.0, -64.0, 2.0**20)
    """Logits that reveal the transform when the head returns them: its slope and its cap."""

    @classmethod
    def fit(cls, transformed: Tensor) -> "LogitTransform":
        """Return the transform that turned PROBES into these values."""
        probes = torch.tensor(cls.PROBES, dtype=torch.float64)
        if transformed.numel() == len(cls.PROBES):
            values = transformed.flatten().double().cpu()
            slope, last = float(values[1] / probes[1]), float(values[-1])
            capped = not abs(last / probes[-1] - slope) < 1e-3 * slope
            transform = cls(_undo_rounding(slope), _undo_rounding(last) if capped else None)
            expected = transform.apply(probes)
            if transform.slope > 0 and torch.allclose(expected, values, rtol=1e-5, atol=1e-9):
                return transform
        raise ValueError("unsupported transform of its logits (supported: a scale, a tanh cap)")

    def apply(self, logits: Tensor) -> Tensor:
        """Transform logits."""
        scaled = logits * self.slope
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def _undo_rounding(number: float) -> float:
    """Return the short decimal number whose float32 value this most likely is."""
    short = float(f"{number:.6g}")
    return short if abs(short - number) <= 3e-7 * abs(number) else number


class Positions(NamedTuple):
    """The input of a head, its weights, and its targets."""

    hidden: Tensor
    """One row per position."""
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    transform: LogitTransform
    chunk: int
    """Positions per chunk."""
    dtype: torch.dtype
    """The dtype of the head's matrix products."""
    hits: Tensor | None = None
    """One number, to which the targets are added whose logit is the largest."""


class _Fused(torch.autograd.Function):
    """Cross-entropy; computes gradients in the forward pass where possible."""

    @staticmethod
    def forward(ctx: Any, summed: bool, *positions: Any) -> Tensor:
        wanted = ctx.needs_input_grad[1:4]
        # The head's gradient is a weighted sum over positions; unless the loss is their sum, the
        # weights are known in the backward pass only.
        later = not summed and any(wanted[1:])
        losses, ctx.gradients = compute_in_chunks(NONE if later else wanted, Positions(*positions))
        if later:
            ctx.save_for_backward(*positions[:4])
            ctx.gradients, ctx.rest = None, positions[4:-1]  # the hits are counted once
        return losses.sum()[None] if summed else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, ()
        if gradients is None:
            wanted = ctx.needs_input_grad[1:4]
            positions = Positions(*ctx.saved_tensors, *ctx.rest)
            _, gradients = compute_in_chunks(wanted, positions, scale)
        else:
            scales = (scale[:, None], scale, scale)
            gradients = [
                gradient if gradient is None else gradient.mul_(factor)
                for gradient, factor in zip(gradients, scales, strict=True)
            ]
        return None, *gradients, None, None, None, None, None


def fused_loss(positions: Positions, summed: bool) -> Tensor:
    """Return the cross-entropy of each position, or their sum, with gradients if enabled."""
    if torch.is_grad_enabled():
        fused: Any = _Fused.apply  # untyped upstream
        losses: Tensor = fused(summed, *positions)
        return losses
    losses, _ = compute_in_chunks(NONE, positions)
    return losses.sum()[None] if summed else losses


@torch.no_grad()
def compute_in_chunks(
    wanted: Sequence[bool], positions: Positions, scale: Tensor | None = None
) -> tuple[Tensor, list[Tensor | None]]:
    """Compute losses, and the wanted gradients (hidden, weight, bias), chunk by chunk.

    A chunk has the whole vocabulary, so each position's loss and gradient are rounded once.
    The head's gradient is accumulated in float32. `scale` weighs each position's gradient.
    """
    hidden, weight, bias, targets, transform, chunk, dtype, hits = positions
    source, table = hidden.to(dtype), weight.to(dtype)
    full = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
    of_hidden = torch.empty_like(source) if wanted[0] else None
    of_weight, of_bias = (
        full(parameter.shape) if want and parameter is not None else None
        for parameter, want in zip((weight, bias), wanted[1:], strict=True)
    )
    losses = full(len(targets))
    buffer = losses.new_empty(min(chunk, len(targets)), len(weight))
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(targets), chunk):
            span = slice(start, start + chunk)
            rows = source[span]
            tile = multiply(rows, table.t(), buffer[: len(rows)])
            if bias is not None:
                tile += bias
            losses[span] = cross_entropy_(tile, targets[span], transform, any(wanted), hits)
            if scale is not None:
                tile *= scale[span, None]
            narrow = tile.to(table.dtype) if any(wanted) else tile
            if of_hidden is not None:
                torch.mm(narrow, table, out=of_hidden[span])
            if of_weight is not None:
                add_product(of_weight, tile, narrow, rows)
            if of_bias is not None:
                of_bias += tile.sum(0)
    # autograd rounds each gradient to the dtype of its tensor.
    return losses, [of_hidden, of_weight, of_bias]


def cross_entropy_(
    tile: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    differentiate: bool,
    hits: Tensor | None,
) -> Tensor:
    """Return -log p of each target; turn the head's output in `tile` into its gradient."""
    columns = targets[:, None]
    tanh_slope = None
    if transform.slope != 1:
        tile *= transform.slope
    if transform.cap is not None:
        tile.div_(transform.cap).tanh_()
        tanh_slope = tile.square().neg_().add_(1) if differentiate else None
        tile *= transform.cap
    tile -= tile.amax(1, keepdim=True)
    picked = tile.gather(1, columns)
    if hits is not None:
        hits += (picked == 0).sum()
    sums = tile.exp_().sum(1, keepdim=True)
    if differentiate:
        tile /= sums
        tile.scatter_add_(1, columns, tile.new_full(columns.shape, -1.0))
        if tanh_slope is not None:
            tile *= tanh_slope
        if transform.slope != 1:
            tile *= transform.slope
    return (sums.log() - picked).squeeze(1)


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Multiply into a float32 tensor; on CUDA without rounding to the inputs' dtype."""
    if left.dtype == torch.float32:
        return torch.mm(left, right, out=out)
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return out.copy_(left @ right)


def add_product(total: Tensor, exact: Tensor, narrow: Tensor, right: Tensor) -> None:
    """Add tile.t() @ right to a float32 sum; `narrow` is the tile in the dtype of `right`."""
    if narrow.dtype != torch.float32 and narrow.device.type == "cuda":
        torch.addmm(total, narrow.t(), right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(exact.t(), right.float())
