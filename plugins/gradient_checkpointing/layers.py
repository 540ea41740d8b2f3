"""Gradient checkpointing of decoder layers; operations may be stored, while the rest is recomputed.

torch's own selective checkpoints refuse operations that only one of the passes runs, such as those
by which ZeRO-3 gathers weights. They also reuse outputs that were changed in place.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn

from plugsft import Capability, RecipeError
from plugsft.kit import decoder_layers


def checkpoint_layers(model: Any, every: int, selective: str | None) -> tuple[int, int]:
    """Recompute every n-th layer in the backward pass; return the counts: chosen, all."""
    layers = decoder_layers(
        model,
        "can be recomputed; remove [plugins.gradient_checkpointing], and lower capacity "
        "or train.micro_batch if memory is short",
    )
    chosen, run = layers[::every], checkpoints(selective)
    for layer in chosen:
        layer._gradient_checkpointing_func, layer.gradient_checkpointing = run, True
    return len(chosen), len(layers)


def checkpoints(selective: str | None) -> Callable[..., Any]:
    """Return a function that runs a layer, and again in the backward pass."""
    contexts = Selection(selective).contexts if selective else noop_context_fn
    # Reentrant checkpoints lose gradients if no input of a layer requires one.
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


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


class Selection:
    """The operations whose outputs are stored."""

    def __init__(self, selective: str) -> None:
        self.option = f'plugins.gradient_checkpointing: selective = "{selective}"'
        self._products = selective == "ops"
        self.has_attention = False
        """Whether an output of attention has been stored."""

    def has(self, operation: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Tell whether the output of an operation is stored."""
        name = operation._schema.name
        if name in ATTENTION:
            stored = not dropout_of(operation, inputs, options)
            self.has_attention |= stored
            return stored
        return self._products and name in PRODUCTS

    def contexts(self) -> tuple["Store", "Reuse"]:
        """Return the contexts of a layer's forward pass and of its recomputation."""
        store = Store(self)
        return store, Reuse(self, store.outputs)


class Output:
    """An operation's output; None once an operation has changed it in place."""

    def __init__(self, value: Any) -> None:
        self.value = tree_map_only(Tensor, Tensor.detach, value)


Outputs = dict[Any, deque[Output]]
"""Stored outputs of each operation, in the order of its calls."""


class Store(TorchDispatchMode):
    """Stores outputs in a layer's forward pass."""

    def __init__(self, selection: Selection) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self.outputs: Outputs = defaultdict(deque)
        self._selection = selection
        self._by_storage: dict[int, Output] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; store its output if it is selected."""
        options = kwargs or {}
        if func._schema.is_mutable:
            self._forget_changed(func, args)
        result = func(*args, **options)
        if self._selection.has(func, args, options):
            output = Output(result)
            self.outputs[func].append(output)
            for tensor in tree_leaves(output.value):
                if isinstance(tensor, Tensor):
                    self._by_storage[tensor.untyped_storage()._cdata] = output
        return result

    def _forget_changed(self, operation: Any, inputs: tuple[Any, ...]) -> None:
        """Forget outputs that an operation changes in place: they are recomputed."""
        for argument, value in zip(operation._schema.arguments, inputs, strict=False):
            changes = argument.alias_info is not None and argument.alias_info.is_write
            if changes and isinstance(value, Tensor):
                output = self._by_storage.get(value.untyped_storage()._cdata)
                if output is not None:
                    output.value = None


class Reuse(TorchDispatchMode):
    """Takes stored outputs in a layer's recomputation."""

    def __init__(self, selection: Selection, outputs: Outputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self._selection, self._outputs = selection, outputs

    def __enter__(self) -> "Reuse":
        """Refuse layers without any attention to store."""
        if not self._selection.has_attention:
            table = Capability.bundled("fast_attention").table
            raise RecipeError(
                f"{self._selection.option}: the layers run no attention operation whose output "
                f"can be stored, or one with dropout; remove selective, or add {table}"
            )
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped upstream
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return an operation's stored output, or run it."""
        options = kwargs or {}
        if self._selection.has(func, args, options):
            output = self._outputs[func].popleft().value
            if output is not None:
                return output
        return func(*args, **options)


def dropout_of(operation: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> float:
    """Return the dropout probability of an attention operation."""
    names = [argument.name for argument in operation._schema.arguments]
    values = dict(zip(names, inputs, strict=False)) | options
    return float(values.get("dropout_p") or 0.0)
