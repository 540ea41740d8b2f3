"""peft's LoRA layer with fewer passes over memory."""

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
SUBTRACTED, REFERENCE = "subtracted", "reference"
"""What a layer does with its frozen initial adapter: it subtracts it, or adds it while adapters are
off."""


class FastLinear(lora.Linear):
    """peft's LoRA layer with fewer passes over memory: adapters compute in the input's dtype.

    peft makes a float32 copy of every input instead, and three of every output.
    """

    initial_A: Tensor
    initial_B: Tensor

    def __init__(self, base_layer: Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(base_layer, *args, **kwargs)
        self.is_target_conv_1d_layer = isinstance(base_layer, Conv1D)
        self.initial, self.casts = "", Casts()
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
        if self.merged or (self.disable_adapters and self.initial != REFERENCE):
            return base
        scale, (first, second) = self.scaling[NAME], self.halves()
        if self.disable_adapters:
            initial_A, initial_B = self.initial_halves()
            return add_product(base, linear(x, initial_A.to(x.dtype)), initial_B.to(x.dtype), scale)
        x = self.lora_dropout[NAME](x)
        inner, frozen = first(x), None
        if self.initial == SUBTRACTED:
            initial_A, frozen = self.initial_halves()
            inner = torch.cat([inner, linear(x, initial_A.to(x.dtype))], -1)
        output: Tensor = second(inner, base, scale, frozen)
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

    def initial_halves(self) -> tuple[Tensor, Tensor]:
        """Return the frozen copies of the adapter's initial weights."""
        return self.initial_A, self.initial_B

    def freeze_initial(self, role: str) -> None:
        """Keep a copy of the adapter's weights; each rank has all of it."""
        self.initial = role
        self.fusible = self.fusible and role != SUBTRACTED
        for name, half in zip(("initial_A", "initial_B"), self.halves(), strict=True):
            self.register_buffer(name, half.weight.detach().clone(), persistent=False)


class Down(Linear):
    """The first half of an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in the dtype of the input."""
        return linear(input, self.weight.to(input.dtype))


class Up(Linear):
    """The second half of an adapter; a module, since ZeRO-3 gathers weights for modules."""

    def forward(  # type: ignore[override]
        self, input: Tensor, base: Tensor, scale: float, subtracted: Tensor | None = None
    ) -> Tensor:
        """Return base + scale * product; `subtracted` multiplies the rest of the input."""
        weight = self.weight.to(input.dtype)
        if subtracted is not None:
            weight = torch.cat([weight, -subtracted.to(input.dtype)], 1)
        return add_product(base, input, weight, scale)


def add_product(base: Tensor, inner: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return base + scale * inner times weight, in one operation, which rounds once."""
    rows = torch.addmm(base.flatten(0, -2), inner.flatten(0, -2), weight.t(), alpha=scale)
    return rows.view(base.shape)
