"""Layers whose saved activations move to host memory."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from plugsft import Capability, Machine, Recipe, RecipeError
from plugsft.kit import decoder_layers

from .copies import Kept, SavedLayer, SideStream, fetch


def ensure_possible(recipe: Recipe, machine: Machine) -> None:
    """Refuse ZeRO-3 and compiled layers, unless each layer is recomputed."""
    recomputed = recipe.provides("recomputed_activations")
    if recomputed and recomputed.value in (None, 1):
        return
    obstacle = ""
    if machine.strategy == "zero3":
        obstacle = "under ZeRO-3 layers save gathered weights, which would stay on the device"
    elif compiled := recipe.provides("compiled_layers"):
        obstacle = f"weights and activations look alike in the compiled layers of {compiled.table}"
    if obstacle:
        cure = f"add {Capability.bundled('recomputed_activations').table}"
        if recomputed:
            cure = f"let {recomputed.table} recompute every layer: remove {recomputed.option}"
        raise RecipeError(
            f"plugins.activation_offload: {obstacle}; {cure}, or remove "
            "[plugins.activation_offload]"
        )


class Offload:
    """Moves what each layer saves for the backward pass to host memory.

    The last layer's stays: the backward pass needs it at once.
    """

    def __init__(self, model: Any, min_bytes: int) -> None:
        self.layers = decoder_layers(model, "can be wrapped; remove [plugins.activation_offload]")
        self.moved = 0
        """Bytes that were moved to host memory."""
        self.on_cpu = False
        self._min_bytes = min_bytes
        self._stream: SideStream | None = None
        self._pending: SavedLayer | None = None
        """The layer whose copies to the host may not have ended."""
        self._latest: Callable[[], SavedLayer | None] = lambda: None
        """The layer that ran last, as long as its backward pass needs it."""
        for layer in self.layers:
            inner = layer._gradient_checkpointing_func if layer.gradient_checkpointing else call
            layer._gradient_checkpointing_func = partial(self.run, layer, inner)
            # transformers calls that function for each layer with this flag, in training.
            layer.gradient_checkpointing = True

    def run(self, layer: Any, inner: Callable[..., Any], forward: Any, *inputs: Any) -> Any:
        """Run a layer; move what it saves while the next layer runs."""
        saved = SavedLayer(self._stream_of(inputs), self._latest)
        shared = getattr(forward, "keywords", {})
        with saved_tensors_hooks(partial(self._pack, saved, Kept(layer, shared)), fetch):
            output = inner(forward, *inputs)
        if self._pending is not None:
            self._pending.release()
        self._pending = None
        if layer is not self.layers[-1]:
            self.moved += saved.store()
            self._pending = saved
        self._latest = weakref.ref(saved)
        return output

    def _pack(self, saved: SavedLayer, kept: Kept, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if (
            type(tensor) is not Tensor
            or storage.nbytes() < self._min_bytes
            or storage.device != saved.device
            or kept.has(tensor)
        ):
            return tensor
        return saved.add(tensor)

    def _stream_of(self, inputs: tuple[Any, ...]) -> SideStream:
        if self._stream is None:
            device = next(each.device for each in inputs if isinstance(each, Tensor))
            self._stream, self.on_cpu = SideStream(device), device.type == "cpu"
        return self._stream


def call(forward: Callable[..., Any], *inputs: Any) -> Any:
    """Run a layer that is not recomputed."""
    return forward(*inputs)
