"""Layers whose saved activations move to host memory, by copies beside the computing.

Two rules keep copies exact. The side stream starts a copy after all that the computing stream has
been given so far. The computing stream waits for a copy before its source or its target is used
again. So torch may reuse all memory in the order of the computing stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from plugsft import Capability, Machine, PluginError, Recipe, RecipeError
from plugsft.kit import decoder_layers


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


class SideStream:
    """A stream of copies beside the computing; a CPU has none, and copies at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._side = self._module.Stream()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Start to copy (source, target) pairs; return the event of their end."""
        self._side.wait_stream(self._module.current_stream())
        with self._module.stream(self._side):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        return self._side.record_event()

    def wait(self, event: Any) -> None:
        """Let the computing wait for an event."""
        self._module.current_stream().wait_event(event)


class Saved(NamedTuple):
    """Stands for a saved tensor."""

    layer: SavedLayer
    storage: int
    """Identity of its memory, which several saved tensors may share."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


Copies = dict[int, Tensor]
"""Identity of a saved tensor's memory -> its bytes."""


class SavedLayer:
    """What one pass of a layer saved: on the device, on the host, or on its way."""

    def __init__(self, stream: SideStream, previous: Callable[[], SavedLayer | None]) -> None:
        self._stream = stream
        self._previous = previous
        """The layer whose backward pass is next."""
        self._saved: dict[int, tuple[Tensor, int]] = {}
        """A saved tensor of each memory, and its version."""
        self._on_device: Copies = {}
        self._on_host: Copies = {}
        self._copied: Any = None
        """The end of copies for which the computing has not waited yet."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._stream.device

    def add(self, tensor: Tensor) -> Saved:
        """Save a tensor; its whole memory will move, once for all that share it."""
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key not in self._saved:
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._saved[key] = tensor, tensor._version
            self._on_device[key] = empty.set_(storage)
        offset = int(tensor.storage_offset())
        return Saved(self, key, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def store(self) -> int:
        """Start to copy to the host; return the bytes."""
        if self._on_device:
            pinned = self.device.type != "cpu"  # so that copies need no processor
            self._copy(self._on_device, self._on_host, device="cpu", pin_memory=pinned)
        return sum(map(len, self._on_host.values()))

    def release(self) -> None:
        """Free the memory on the device, once it is copied."""
        self._wait()
        for tensor, version in self._saved.values():
            if tensor._version != version:
                raise PluginError(
                    "plugins.activation_offload: the model changed an activation in place after "
                    "it was saved for the backward pass; remove [plugins.activation_offload]"
                )
        self._saved.clear()
        self._on_device.clear()

    def load(self) -> None:
        """Start to copy back to the device."""
        if self._on_host and not self._on_device:
            self._copy(self._on_host, self._on_device, device=self.device)

    def _copy(self, sources: Copies, targets: Copies, **memory: Any) -> None:
        for key, source in sources.items():
            targets[key] = torch.empty_like(source, **memory)
        self._copied = self._stream.copy((source, targets[key]) for key, source in sources.items())

    def fetch(self, saved: Saved) -> Tensor:
        """Return a saved tensor; start to copy the layer whose backward pass is next."""
        self.load()
        if (previous := self._previous()) is not None:
            previous.load()
        self._wait()
        storage = self._on_device[saved.storage].untyped_storage()
        empty = torch.empty(0, dtype=saved.dtype, device=self.device)
        return empty.set_(storage, saved.offset, saved.size, saved.stride)

    def _wait(self) -> None:
        if self._copied is not None:
            self._stream.wait(self._copied)
        self._copied = None

    def __del__(self) -> None:
        """Wait for copies that nobody needs any more before their memory is reused."""
        self._wait()


def fetch(saved: Any) -> Tensor:
    """Return a tensor for the backward pass."""
    tensor: Tensor = saved.layer.fetch(saved) if isinstance(saved, Saved) else saved
    return tensor


class Kept:
    """Tensors that stay on the device: weights, their casts, and what all layers share."""

    def __init__(self, layer: Any, shared: dict[str, Any]) -> None:
        self._layer, self._shared = layer, shared
        self._storages = set[int]()
        self._shapes = set[tuple[int, ...]]()

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor stays."""
        if not self._storages:
            # Sharding gathers weights into other memory for each pass.
            parts = tree_leaves([*self._layer.parameters(), *self._layer.buffers(), self._shared])
            tensors = [each for each in parts if isinstance(each, Tensor)]
            self._storages = {each.untyped_storage()._cdata for each in tensors}
            self._shapes = {tuple(each.shape) for each in self._layer.parameters()}
        # A linear layer saves its weight, or the cast that autocast made of it, transposed.
        cast = tensor.dim() == 2 and tensor.stride(0) == 1
        return tensor.untyped_storage()._cdata in self._storages or (
            cast and tuple(reversed(tensor.shape)) in self._shapes
        )
