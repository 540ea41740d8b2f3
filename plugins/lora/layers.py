"""peft's LoRA layer with fewer passes over memory."""

from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

NAME = "default"
"""peft's name of a model's only adapter."""


class FastLinear(lora.Linear):
    """peft's LoRA layer with fewer passes over memory: adapters compute in the input's dtype.

    peft makes a float32 copy of every input instead, and three of every output.
    """

    def __init__(self, base_layer: Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(base_layer, *args, **kwargs)
        self.is_target_conv_1d_layer = isinstance(base_layer, Conv1D)
        if not self.lora_variant:
            self.lora_A[NAME].__class__, self.lora_B[NAME].__class__ = Down, Up

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Add the adapter's output to the base layer's."""
        if self.lora_variant:
            return super().forward(x, *args, **kwargs)
        base: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return base
        inner = self.lora_A[NAME](self.lora_dropout[NAME](x))
        output: Tensor = self.lora_B[NAME](inner, base, self.scaling[NAME])
        return output


class Down(Linear):
    """The first half of an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in the dtype of the input."""
        return linear(input, self.weight.to(input.dtype))


class Up(Linear):
    """The second half of an adapter; a module, since ZeRO-3 gathers weights for modules."""

    def forward(self, input: Tensor, base: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        """Return base + scale * product, in one operation."""
        weight = self.weight.to(input.dtype).t()
        return torch.addmm(base.flatten(0, -2), input.flatten(0, -2), weight, alpha=scale).view(
            base.shape
        )
