"""The loss of hidden states, in parts: the logits of all positions are never held."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NONE = (False, False, False)


@dataclass(frozen=True)
class Behind:
    """What a model does to what its head gives: x -> cap * tanh(slope * x / cap)."""

    slope: float = 1.0
    cap: float | None = None

    PROBES: ClassVar = (0.0, 2.0**-10, -(2.0**-10), 0.75, -3.0, 20.0, -64.0, 2.0**20)
    """Put in place of logits, they show what becomes of them: the slope, and where it ends."""

    def __str__(self) -> str:
        slope = f"logits scaled by {self.slope:.6g}" if self.slope != 1 else ""
        cap = f"soft cap {self.cap:g}" if self.cap else ""
        return ", ".join(filter(None, [slope, cap]))

    @classmethod
    def read(cls, seen: Tensor) -> "Behind":
        """Find the function that made of PROBES what is seen."""
        given = torch.tensor(cls.PROBES, dtype=torch.float64)
        if seen.numel() == len(cls.PROBES):
            seen = seen.flatten().double().cpu()
            slope, last = float(seen[1] / given[1]), float(seen[-1])
            capped = not abs(last / given[-1] - slope) < 1e-3 * slope
            found = cls(_shorter(slope), _shorter(last) if capped else None)
            if found.slope > 0 and torch.allclose(found.of(given), seen, rtol=1e-5, atol=1e-9):
                return found
        raise ValueError("behind its head it does to the logits what is unknown here")

    def of(self, logits: Tensor) -> Tensor:
        """Do it."""
        scaled = logits * self.slope
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def _shorter(number: float) -> float:
    """Return the number that was rounded to this one in float32, most likely."""
    short = float(f"{number:.6g}")
    return short if abs(short - number) <= 3e-7 * abs(number) else number


class Positions(NamedTuple):
    """What is before a head, and what is wanted of it."""

    hidden: Tensor
    """A row for each position."""
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    behind: Behind
    chunk: int
    """Positions at a time."""
    dtype: torch.dtype
    """The type that the head computes in."""


class _Fused(torch.autograd.Function):
    """The losses, with gradients that are there when they are, if that can be."""

    @staticmethod
    def forward(ctx: Any, summed: bool, *given: Any) -> Tensor:
        wanted = ctx.needs_input_grad[1:4]
        # The head's gradient adds up positions: how much each counts must be known before.
        later = not summed and any(wanted[1:])
        losses, ctx.gradients = compute(NONE if later else wanted, Positions(*given))
        if later:
            ctx.save_for_backward(*given[:4])
            ctx.gradients, ctx.rest = None, given[4:]
        return losses.sum()[None] if summed else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, ()
        if gradients is None:
            wanted = ctx.needs_input_grad[1:4]
            _, gradients = compute(wanted, Positions(*ctx.saved_tensors, *ctx.rest), scale)
        else:
            scales = (scale[:, None], scale, scale)
            gradients = [
                one if one is None else one.mul_(by)
                for one, by in zip(gradients, scales, strict=True)
            ]
        return None, *gradients, None, None, None, None


def fused_loss(given: Positions, summed: bool) -> Tensor:
    """Return the cross-entropy of positions, or one that is all, with the gradient if wanted."""
    if torch.is_grad_enabled():
        fused: Any = _Fused.apply  # untyped upstream
        losses: Tensor = fused(summed, *given)
        return losses
    losses, _ = compute(NONE, given)
    return losses.sum()[None] if summed else losses


@torch.no_grad()
def compute(
    wanted: Sequence[bool], given: Positions, scale: Tensor | None = None
) -> tuple[Tensor, list[Tensor | None]]:
    """Go through the positions in parts; return the losses, and gradients that are wanted.

    Each part has the whole vocabulary: what it learns of a position is final, and rounded once.
    The head's own gradient is summed up in float32. `scale` says how much each position counts.
    """
    hidden, weight, bias, targets, behind, chunk, dtype = given
    source, table = hidden.to(dtype), weight.to(dtype)
    full = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
    of_hidden = torch.empty_like(source) if wanted[0] else None
    of_weight, of_bias = (
        full(one.shape) if want and one is not None else None
        for one, want in zip((weight, bias), wanted[1:], strict=True)
    )
    losses = full(len(targets))
    room = losses.new_empty(min(chunk, len(targets)), len(weight))
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            rows = source[part]
            tile = product(rows, table.t(), room[: len(rows)])
            if bias is not None:
                tile += bias
            losses[part] = score(tile, targets[part], behind, any(wanted))
            if scale is not None:
                tile *= scale[part, None]
            narrow = tile.to(table.dtype) if any(wanted) else tile
            if of_hidden is not None:
                torch.mm(narrow, table, out=of_hidden[part])
            if of_weight is not None:
                add_product(of_weight, tile, narrow, rows)
            if of_bias is not None:
                of_bias += tile.sum(0)
    # autograd rounds them to the types of what they are gradients of.
    return losses, [of_hidden, of_weight, of_bias]


def score(tile: Tensor, targets: Tensor, behind: Behind, differentiate: bool) -> Tensor:
    """Return -log p of each target; what the head gave becomes, in place, the gradient of that."""
    places = targets[:, None]
    bent = None
    if behind.slope != 1:
        tile *= behind.slope
    if behind.cap is not None:
        tile.div_(behind.cap).tanh_()
        bent = tile.square().neg_().add_(1) if differentiate else None
        tile *= behind.cap
    tile -= tile.amax(1, keepdim=True)
    picked = tile.gather(1, places)
    sums = tile.exp_().sum(1, keepdim=True)
    if differentiate:
        tile /= sums
        tile.scatter_add_(1, places, tile.new_full(places.shape, -1.0))
        if bent is not None:
            tile *= bent
        if behind.slope != 1:
            tile *= behind.slope
    return (sums.log() - picked).squeeze(1)


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Multiply into a place of float32, unrounded where the device can."""
    if left.dtype == torch.float32:
        return torch.mm(left, right, out=out)
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return out.copy_(left @ right)


def add_product(total: Tensor, exact: Tensor, narrow: Tensor, right: Tensor) -> None:
    """Add to a sum in float32 the product of a tile, which is there in two types."""
    if narrow.dtype != torch.float32 and narrow.device.type == "cuda":
        torch.addmm(total, narrow.t(), right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(exact.t(), right.float())
