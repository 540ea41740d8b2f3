"""Operations whose outputs are stored, while the rest of a layer is recomputed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from plugsft import Capability, RecipeError

ATTENTION = {
    # SDPA, on the CPU and on GPUs.
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    # Kernels for packed rows: torch's own, called directly and through its Python interface.
    "aten::_cudnn_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
    # The packages flash-attn and flash-attn-3.
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::_flash_attn_forward",
    "flash_attn_3::fwd",
}
PRODUCTS = {"aten::_grouped_mm", "aten::_scaled_mm", "aten::addmm", "aten::mm"}


class StoredOutputs:
    """Chooses the operations whose outputs are stored."""

    def __init__(self, selective: str) -> None:
        self._option = f'plugins.gradient_checkpointing: selective = "{selective}"'
        self._products = selective == "ops"
        self._seen = False
        """Whether an output of attention has been stored."""

    def policy(self) -> Callable[..., CheckpointPolicy]:
        """Return the policy for one forward pass of a layer."""
        storages = set[int]()

        def choose(seen: Any, operation: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
            self._ensure_unchanged(storages, operation, inputs)
            if not self._is_stored(operation, inputs, options):
                return CheckpointPolicy.PREFER_RECOMPUTE
            outputs = tree_leaves(seen.op_output)
            storages.update(storage_of(each) for each in outputs if isinstance(each, Tensor))
            return CheckpointPolicy.MUST_SAVE

        return choose

    def _is_stored(self, operation: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> bool:
        name = operation._schema.name
        if name in ATTENTION and not dropout_of(operation, inputs, options):
            self._seen = True
            return True
        # An autograd function may change its products; it runs without gradients.
        return self._products and name in PRODUCTS and torch.is_grad_enabled()

    def _ensure_unchanged(
        self, storages: set[int], operation: Any, inputs: tuple[Any, ...]
    ) -> None:
        """Refuse an operation in place on a stored output, which would be applied to it twice."""
        if not operation._schema.is_mutable:
            return
        for argument, value in zip(operation._schema.arguments, inputs, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and storage_of(value) in storages:
                name = operation._schema.name
                raise RecipeError(
                    f"{self._option}: the model changes a stored output in place ({name}); "
                    "remove selective"
                )

    @contextmanager
    def reuse(self) -> Iterator[None]:
        """Refuse layers without any attention to store."""
        if not self._seen:
            table = Capability.bundled("fast_attention").table
            raise RecipeError(
                f"{self._option}: the layers run no attention operation whose output can be "
                f"stored, or one with dropout; remove selective, or add {table}"
            )
        yield


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def dropout_of(operation: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> float:
    """Return the dropout probability of an attention operation."""
    names = [argument.name for argument in operation._schema.arguments]
    values = dict(zip(names, inputs, strict=False)) | options
    return float(values.get("dropout_p") or 0.0)
