"""peft's LoRA layer with fewer passes over memory; a plain one is one operation of autograd.

Autograd alone multiplies by the scale, sums gradients of the input, and casts adapters and their
gradients in operations of their own. A GPU waits for the launches of a small model's layers.
"""

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, dtype
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Identity, Linear, Module
from torch.nn.functional import linear
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.pytorch_utils import Conv1D

NAME = "default"
"""peft's name of a model's only adapter."""


class FastLinear(lora.Linear):
    """peft's LoRA layer with fewer passes over memory: adapters compute in the input's dtype.

    peft makes a float32 copy of every input instead, and three of every output.
    """

    reference_A: Tensor
    reference_B: Tensor

    def __init__(self, base_layer: Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(base_layer, *args, **kwargs)
        self.is_target_conv_1d_layer = isinstance(base_layer, Conv1D)
        self.has_reference, self.casts = False, Casts()
        if not self.lora_variant:
            self.lora_A[NAME].__class__, self.lora_B[NAME].__class__ = Down, Up
        without_dropout = isinstance(self.lora_dropout[NAME], Identity)
        self.fusible = without_dropout and type(base_layer) is Linear and not self.lora_variant

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Add the adapter's output to the base layer's."""
        if self.lora_variant:
            return super().forward(x, *args, **kwargs)
        if (
            self.fusible
            and not (self.merged or self.disable_adapters)
            and is_plain(self.base_layer, self.halves(), x)
        ):
            return self.fused(x)
        base: Tensor = self.base_layer(x, *args, **kwargs)
        if self.merged or (self.disable_adapters and not self.has_reference):
            return base
        scale, (first, second) = self.scaling[NAME], self.halves()
        if self.disable_adapters:
            inner = linear(x, self.reference_A.to(x.dtype))
            return add_product(base, inner, self.reference_B.to(x.dtype), scale)
        output: Tensor = second(first(self.lora_dropout[NAME](x)), base, scale)
        return output

    def fused(self, x: Tensor) -> Tensor:
        """Compute layer and adapter as one operation of autograd."""
        base, (first, second), rows = self.base_layer, self.halves(), x.flatten(0, -2)
        weights = (base.weight, base.bias, first.weight, second.weight)
        casts = self.casts.get(first.weight, second.weight, x.dtype)
        apply: Any = AdaptedLinear.apply  # untyped upstream
        output: Tensor = apply(rows, *weights, *casts, self.scaling[NAME])
        return output.view(*x.shape[:-1], -1)

    def halves(self) -> tuple[Any, Any]:
        """Return the two halves of the adapter."""
        return self.lora_A[NAME], self.lora_B[NAME]

    def keep_reference(self) -> None:
        """Keep a copy of the adapter, added while adapters are off; each rank has all of it."""
        self.has_reference = True
        for name, half in zip(("reference_A", "reference_B"), self.halves(), strict=True):
            self.register_buffer(name, half.weight.detach().clone(), persistent=False)


class Down(Linear):
    """The first half of an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in the dtype of the input."""
        return linear(input, self.weight.to(input.dtype))


class Up(Linear):
    """The second half of an adapter; a module, since ZeRO-3 gathers weights for modules."""

    def forward(  # type: ignore[override]
        self, input: Tensor, base: Tensor, scale: float
    ) -> Tensor:
        """Return base + scale * product."""
        return add_product(base, input, self.weight.to(input.dtype), scale)


def add_product(base: Tensor, inner: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return base + scale * inner times weight, in one operation, which rounds once."""
    rows = torch.addmm(base.flatten(0, -2), inner.flatten(0, -2), weight.t(), alpha=scale)
    return rows.view(base.shape)


def adapted_layers(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with adapters, by name."""
    layers = model.named_modules()
    return ((name, layer) for name, layer in layers if isinstance(layer, lora.LoraLayer))


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
    weight: Any, cast: Tensor, left: Tensor, right: Tensor, scale: float
) -> Tensor | None:
    """Add scale * left' right to the weight's gradient; return it if there is none yet.

    On a GPU, products of bfloat16 are summed in the weight's float32 without rounding; compiled
    products are rounded, since torch 2.11 cannot trace `out_dtype`. Values of `weight` and `cast`
    are not read where beta is 0.
    """
    # Hooks want to see the gradient of each backward pass.
    watched = (
        torch.compiler.is_compiling()
        or weight._backward_hooks
        or weight._post_accumulate_grad_hooks
    )
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
