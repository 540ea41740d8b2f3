"""Linear layers in 8 bits, whose weights are quantized as transformers loads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import linear
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "plugsft_int8"


@register_quantization_config(METHOD)
@dataclass
class Int8Config(QuantizationConfigMixin):
    """How the base was quantized; written beside adapters."""

    quant_method: Any
    dtype: str = "float32"
    """The dtype that weights are restored in."""
    left_out: list[str] = field(default_factory=list)


class Int8Linear(Linear):
    """Stores a weight in 8 bits, with a scale for each output."""

    scale: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return the restored weight."""
        return self.codes * self.scale

    @property
    def codes(self) -> Tensor:
        """Return the stored parameter, which is named `weight`."""
        codes = self._parameters["weight"]
        assert codes is not None
        return codes

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with the restored weight."""
        apply: Any = Product.apply  # untyped upstream
        product: Tensor = apply(x.to(self.scale.dtype), self.codes, self.scale, self.bias)
        return product


class Product(torch.autograd.Function):
    """Restores the weight for the product, and again for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply with a weight that is freed at once."""
        ctx.save_for_backward(codes, scale)
        return linear(x, codes * scale, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Multiply with the weight again."""
        codes, scale = ctx.saved_tensors
        return gradient @ (codes * scale), None, None, None


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight in 8 bits, and the scales of its rows."""
    largest = weight.abs().amax(1, keepdim=True).float()
    scale = (largest / 127).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    codes = (weight / scale.float()).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale


class Unquantized(Linear):
    """A layer that will have 8 bits; until then, its weight has the dtype that it is read in."""


def replace(layer: Any) -> None:
    """Turn a layer without data into one that will have 8 bits."""
    layer.source_cls = type(layer)  # as transformers notes it
    if isinstance(layer, Conv1D):
        layer.in_features, layer.out_features = layer.nx, layer.nf
    layer.__class__ = Unquantized
    empty = layer.weight.new_empty(layer.out_features, layer.in_features, device="meta")
    layer.weight = Parameter(empty, requires_grad=False)


def store(layer: Any, codes: Tensor, scale: Tensor) -> None:
    """Give a layer its quantized weight."""
    layer.weight = Parameter(codes, requires_grad=False)
    layer.register_buffer("scale", scale, persistent=False)
    layer.__class__ = Int8Linear


@register_quantizer(METHOD)
class Int8Quantizer(HfQuantizer):
    """Quantizes the weights of linear layers as they are loaded."""

    quantization_config: Int8Config
    is_trainable = True

    def is_serializable(self) -> bool:
        """Tell that the quantized weights are not saved: adapters are."""
        return False

    def update_device_map(self, device_map: Any) -> Any:
        """Quantize on the GPU if there is one."""
        gpu = torch.cuda.is_available()
        return device_map or {"": torch.cuda.current_device() if gpu else "cpu"}

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        config, self.scales = self.quantization_config, dict[Any, Tensor]()
        left_out = self.get_modules_to_not_convert(
            model, config.left_out or None, model._keep_in_fp32_modules
        )
        for name, module in model.named_modules():
            is_linear = isinstance(module, Conv1D) or type(module) is Linear
            if is_linear and should_convert_module(name, left_out):
                replace(module)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Tell whether a parameter is the weight of a layer in 8 bits."""
        path, _dot, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(path), Unquantized)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes of a stored weight; a GPU reserves them before the weights are read."""
        if self.param_needs_quantization(model, param_name):
            return 1
        size: float = super().param_element_size(model, param_name, param)
        return size

    def get_quantize_ops(self) -> Int8Quantize:
        """Return the conversion of a loaded weight."""
        return Int8Quantize(self)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        # Only now: transformers reads the dtype of a layer's weight, and moves or empties buffers.
        for layer, scale in self.scales.items():
            store(layer, layer.weight.data, scale)
        return model


class Int8Quantize(ConversionOps):
    """Converts a loaded weight."""

    def __init__(self, quantizer: Int8Quantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: Any, *_: Any, **others: Any) -> Any:
        """Return the codes; the quantizer keeps the scales."""
        [(name, value)], model = input_dict.items(), others["model"]
        weight = value[0] if isinstance(value, list) else value
        layer = model.get_submodule(name.rpartition(".")[0])
        if issubclass(layer.source_cls, Conv1D):
            weight = weight.T
        codes, scale = quantize(weight, getattr(torch, self.quantizer.quantization_config.dtype))
        self.quantizer.scales[layer] = scale
        layer._is_hf_initialized = True
        return {name: Parameter(codes.contiguous(), requires_grad=False)}
