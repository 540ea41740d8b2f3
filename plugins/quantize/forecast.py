"""Layers in NF4; without data, for `plugsft plan`: their sizes, and the memory of a product."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from bitsandbytes.nn.modules import Linear4bit
from torch import Size, Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4: 4 bits, an 8-bit scale for 64 of them, a scale for 256 scales."""


def prepare_nf4(model: Any, dtype: str) -> list[Any]:
    """Keep the weights as they are in evaluations; return the layers."""
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    for layer in layers:
        if layer.weight.is_meta:
            forecast(layer, dtype)
        # Evaluations on a CPU with bfloat16 would pack the weights another way, and round them.
        layer.support_avx512bf16_for_cpu = False
    return layers


def forecast(layer: Any, dtype: str) -> None:
    """Give a layer without data the size of its quantized weight."""
    shape = Size([layer.out_features, layer.in_features])
    size = math.ceil(shape.numel() * BYTES)
    weight = torch.empty(size, dtype=torch.uint8, device="meta")
    layer.weight = Parameter(weight, requires_grad=False)
    layer.weight.quant_state = SimpleNamespace(shape=shape)
    layer.restored, layer.compute_dtype = shape, getattr(torch, dtype)
    layer.__class__ = EmptyLayer


class EmptyLayer(Linear4bit):
    """A quantized layer without data."""

    restored: Size

    def forward(self, x: Tensor) -> Tensor:
        """Allocate what the product of a quantized layer allocates."""
        apply: Any = Product.apply  # untyped upstream
        product: Tensor = apply(x.to(self.compute_dtype), self.bias, self.restored)
        return product.to(x.dtype)


class Product(torch.autograd.Function):
    """Restores the weight for the product, and again for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, shape: Size) -> Tensor:
        """Multiply with a weight that is freed at once."""
        ctx.shape = shape
        return linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Multiply with the weight again."""
        return gradient @ gradient.new_empty(ctx.shape), None, None
