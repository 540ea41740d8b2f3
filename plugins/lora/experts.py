"""Adapters of fused experts: each expert has an A and a B of its own."""

from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import transformers_weight_conversion as conversion
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

from plugsft import RecipeError
from plugsft.kit import whole_shape

from .layers import NAME

IMPLEMENTATION = "plugsft_lora"
"""Name of this computation of experts in transformers."""
ALIGNED = 8
"""Grouped products on a GPU need ranks that are multiples of this; others are padded with zeros."""


ADAPTABLE = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the weights that `adapted_forward` multiplies by."""


def expert_weights(model: Module) -> dict[str, Module]:
    """Return the weights that hold a matrix of each expert: name -> module."""
    return {
        name: model.get_submodule(name.rpartition(".")[0])
        for name, parameter in model.named_parameters()
        if "expert" in name and len(whole_shape(parameter)) == 3
    }


def is_adaptable(name: str, experts: Module) -> bool:
    """Tell whether transformers lets others compute the experts that a weight belongs to."""
    return hasattr(experts, "has_gate") and name.rpartition(".")[2] in ADAPTABLE


def ensure_adaptable(weights: dict[str, Module]) -> None:
    """Refuse experts that are computed by their model's own code."""
    for name, experts in weights.items():
        if not is_adaptable(name, experts):
            raise RecipeError(
                f"plugins.lora: {name} belongs to a {type(experts).__name__}, whose experts cannot "
                "have adapters; remove experts = true, and name no such weight in targets"
            )


def describe_frozen(model: Module) -> str:
    """Describe the expert weights without adapters, and how they get some; "" if there are none."""
    adapted = {
        (module.get_base_layer(), module.parameter_name)
        for module in model.modules()
        if isinstance(module, ExpertAdapter)
    }
    frozen = {
        name: experts
        for name, experts in expert_weights(model).items()
        if (experts, name.rpartition(".")[2]) not in adapted
    }
    if not frozen:
        return ""
    can = all(is_adaptable(name, experts) for name, experts in frozen.items())
    return f"{len(frozen)} expert weights are frozen" + (
        "; experts = true in [plugins.lora] adapts them" if can else ", and cannot have adapters"
    )


def renamed_by_peft(names: list[str], model: Any) -> list[str]:
    """Return the linear layers that peft takes for experts of an older version of the model.

    peft would adapt the experts in their place, with twice the rank. It leaves their weights alone
    if these are named as parameters.
    """
    kinds: dict[str, str] = vars(conversion)["_MODEL_TO_CONVERSION_PATTERN"]
    kind = kinds.get(model.config.model_type, "")
    old_names = conversion._MOE_TARGET_MODULE_MAPPING.get(kind, {})
    return [name for name in names if name.rpartition(".")[2] in old_names]


def hand_factors(model: Module) -> None:
    """Let the adapters of expert weights multiply by A and B, and never make a whole weight.

    peft adds the product of A and B to the weights of all experts in every forward pass, and keeps
    the sum for the backward pass.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, adapted_forward)
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.__class__ = ExpertAdapter
            module.lora_A[NAME].__class__ = Down
            module.lora_B[NAME].__class__ = Up
            experts: Any = module.get_base_layer()
            experts.factors = {}
            experts.config._experts_implementation = IMPLEMENTATION


class ExpertAdapter(ParamWrapper):
    """peft's adapter of one expert weight; hands A and B to the module that multiplies."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the experts, or the adapter of their other weight, with A and B in place."""
        if self.disable_adapters or self.merged:
            return self.base_layer(*args, **kwargs)
        experts: Any = self.get_base_layer()
        down, up = self.lora_A[NAME], self.lora_B[NAME]
        dtype = getattr(experts, self.parameter_name).dtype
        experts.factors[self.parameter_name] = (
            down(self.num_experts, dtype),
            up(self.num_experts, dtype, self.scaling[NAME]),
        )
        try:
            return self.base_layer(*args, **kwargs)
        finally:
            del experts.factors[self.parameter_name]


class Down(Linear):
    """The A of all experts; a module, since ZeRO-3 gathers weights for modules."""

    def forward(self, experts: int, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """Return a copy as [expert, input, rank]."""
        factors = self.weight.to(dtype, copy=True).view(experts, -1, self.in_features)
        return aligned(factors).transpose(1, 2)


class Up(Linear):
    """The B of all experts; peft stores the number of the expert last."""

    def forward(  # type: ignore[override]
        self, experts: int, dtype: torch.dtype, scale: float
    ) -> Tensor:
        """Return a scaled copy as [expert, rank, output]."""
        factors = (self.weight * scale).to(dtype).view(self.out_features, -1, experts)
        return aligned(factors.permute(2, 1, 0).contiguous())


def aligned(factors: Tensor) -> Tensor:
    """Pad [expert, rank, width] to a rank that grouped products take."""
    return pad(factors, (0, 0, 0, -factors.shape[1] % ALIGNED))


def adapted_forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute experts like transformers' grouped_mm, with adapters.

    `chosen` and `weights` are [token, choice]: the numbers of experts, and what each counts.
    """
    numbers, order = chosen.reshape(-1).sort(stable=True)
    every = torch.arange(experts.num_experts, device=numbers.device)
    # Rows are sorted by expert; `ends` says where each expert's rows end.
    ends = torch.searchsorted(numbers, every, right=True).to(torch.int32)
    inputs = hidden[order // chosen.shape[-1]]
    if experts.has_gate:
        inner = experts._apply_gate(multiply(experts, "gate_up_proj", inputs, numbers, ends))
    else:
        inner = experts.act_fn(multiply(experts, "up_proj", inputs, numbers, ends))
    outputs = multiply(experts, "down_proj", inner, numbers, ends)
    if experts.has_post_expert_norm:
        outputs = experts.post_expert_norm(outputs)
    outputs = outputs[order.argsort()].view(*chosen.shape, -1) * weights[..., None]
    total: Tensor = outputs.sum(1)
    return total.to(hidden.dtype)


def multiply(experts: Any, name: str, inputs: Tensor, numbers: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by its expert's weight, and add the adapter's output."""
    bias = getattr(experts, f"{name}_bias")[numbers] if experts.has_bias else None
    weight, transposed = getattr(experts, name), experts.is_transposed
    base: Tensor = _grouped_linear(inputs, weight, ends, bias, transposed)
    factors = getattr(experts, "factors", {}).get(name)
    if factors is None:
        return base
    down, up = factors
    inner = _grouped_linear(inputs, down, ends, is_transposed=True)
    return base + _grouped_linear(inner, up, ends, is_transposed=True)
