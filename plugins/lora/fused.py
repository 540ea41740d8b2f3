"""A linear layer and its adapter as one operation of autograd.

Autograd alone multiplies by the scale, sums gradients of the input, and casts adapters and their
gradients in operations of their own. A GPU waits for the launches of a small model's layers.
"""

from typing import Any

import torch
from torch import Tensor, dtype
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Linear, Module
from torch.nn.functional import linear
from torch.optim.optimizer import register_optimizer_step_post_hook


class AdaptedLinear(Function):
    """Computes x W' + bias + scale * x A' B' for rows x; W and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        A: Tensor,
        B: Tensor,
        cast_A: Tensor,
        cast_B: Tensor,
        scale: float,
    ) -> Tensor:
        """Add the adapter's product in place; the casts of A and B have the dtype of the rows."""
        inner = linear(rows, cast_A)
        ctx.save_for_backward(rows, weight, cast_A, cast_B, inner)
        ctx.A, ctx.B, ctx.scale = A, B, scale
        output = linear(rows, weight, bias)
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            # The product must not change: torch 2.11 compiles no gradients through it then, and
            # selective checkpointing stores it.
            return torch.addmm(output, inner, cast_B.t(), alpha=scale)
        return output.addmm_(inner, cast_B.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of the rows, A and B."""
        rows, weight, cast_A, cast_B, inner = ctx.saved_tensors
        scale, of_rows, of_A, of_B = ctx.scale, None, None, None
        inner_gradient = gradient @ cast_B
        if ctx.needs_input_grad[0]:
            of_rows = (gradient @ weight).addmm_(inner_gradient, cast_A, alpha=scale)
        if ctx.needs_input_grad[3]:
            of_A = add_gradient(ctx.A, cast_A, inner_gradient, rows, scale)
        if ctx.needs_input_grad[4]:
            of_B = add_gradient(ctx.B, cast_B, gradient, inner, scale)
        return of_rows, None, None, of_A, of_B, None, None, None


def add_gradient(
    weight: Tensor, cast: Tensor, left: Tensor, right: Tensor, scale: float
) -> Tensor | None:
    """Add scale * left' right to the weight's gradient; return it if there is none yet.

    On a GPU, products of bfloat16 are summed in the weight's float32 without rounding; compiled
    products are rounded, since torch 2.11 cannot trace `out_dtype`. Values of `weight` and `cast`
    are not read where beta is 0.
    """
    watched = torch.compiler.is_compiling() or has_hooks(weight)
    total = None if watched else weight.grad
    start, beta = (weight, 0) if total is None else (total, 1)
    options: dict[str, Any] = {"beta": beta, "alpha": scale, "out": total}
    if left.dtype == weight.dtype:
        product = torch.addmm(start, left.t(), right, **options)
    elif left.device.type == "cpu" or torch.compiler.is_compiling():
        product = torch.addmm(cast, left.t(), right, beta=0, alpha=scale)
        product = product.to(weight.dtype) if total is None else total.add_(product)
    else:
        product = torch.addmm(start, left.t(), right, out_dtype=weight.dtype, **options)
    return product if total is None else None


def has_hooks(weight: Any) -> bool:
    """Tell whether anyone wants to see the gradient of each backward pass."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


class Casts:
    """The adapter of a layer in another dtype, cast once for all micro-batches of a step."""

    steps = 0
    """Optimizer steps of this process; fused optimizers leave a tensor's version as it is."""

    def __init__(self) -> None:
        self._key: Any = None
        self._casts: tuple[Tensor, Tensor]

    def get(self, A: Tensor, B: Tensor, dtype: dtype) -> tuple[Tensor, Tensor]:
        """Return A and B in a dtype, without gradients.

        Evaluations always cast: they may use other weights, and FSDP2 changes no version of them.
        """
        if A.dtype == dtype or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return A.detach().to(dtype), B.detach().to(dtype)
        key = (Casts.steps, A._version, B._version, dtype)
        if self._key != key:
            self._casts = A.detach().to(dtype), B.detach().to(dtype)
            self._key = key
        return self._casts


def count_step(*_: Any) -> None:
    """Make all casts stale."""
    Casts.steps += 1


register_optimizer_step_post_hook(count_step)


def is_plain(base: Any, halves: tuple[Linear, Linear], x: Tensor) -> bool:
    """Tell whether a product has no other dtype, no trained base, and no hooks around it."""
    dtype, device = x.dtype, x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if not x.dtype == base.weight.dtype == dtype or base.weight.requires_grad:
        return False
    return not (is_hooked(base) or is_hooked(halves[0]) or is_hooked(halves[1]))


def is_hooked(module: Module) -> bool:
    """Tell whether a module must be called as one: ZeRO-3 gathers its weights by such hooks."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
