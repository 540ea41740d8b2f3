"""peft's LoRA layer with fewer passes over memory."""

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor
from torch.nn import Identity, Linear, Module
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from .fused import AdaptedLinear, Casts, is_plain

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
