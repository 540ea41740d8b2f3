"""Activations that a plugin moves to host memory, in a trace."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from .trace import HOST, LAYERS, Tracer

MIN_BYTES = 1_000_000
"""Smallest activation that is moved by default."""


class _Saved:
    """What the pass of a layer saved."""

    def __init__(self, previous: "_Saved | None") -> None:
        self.previous = previous
        self.storages = set[int]()
        self.on_host = False


class Offload:
    """Moves what each layer saves: to the host after the next layer, and back one layer ahead."""

    def __init__(self, layers: list[Any], min_bytes: int | None) -> None:
        self._min_bytes = MIN_BYTES if min_bytes is None else min_bytes
        self._tracer = Tracer([])
        self._latest: _Saved | None = None
        for layer in layers:
            inner = layer._gradient_checkpointing_func if layer.gradient_checkpointing else _call
            layer._gradient_checkpointing_func = partial(self._run, inner)
            layer.gradient_checkpointing = True

    def start(self, tracer: Tracer) -> None:
        """Start a pass of the model."""
        self._tracer, self._latest = tracer, None

    def _run(self, inner: Callable[..., Any], forward: Any, *inputs: Any) -> Any:
        saved = _Saved(self._latest)
        shared = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves(getattr(forward, "keywords", {}))
            if isinstance(tensor, Tensor)
        }
        with saved_tensors_hooks(partial(self._pack, saved, shared), self._unpack):
            output = inner(forward, *inputs)
        self._move(self._latest, to_host=True)
        self._latest = saved
        return output

    def _pack(self, saved: _Saved, shared: set[int], tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        # A linear layer saves its weight, or the cast that autocast made of it, transposed.
        is_weight = tensor.dim() == 2 and tensor.stride(0) == 1
        if is_weight or storage.nbytes() < self._min_bytes or storage._cdata in shared:
            return tensor
        saved.storages.add(storage._cdata)
        return saved, tensor

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved, tensor = packed
        self._move(saved, to_host=False)
        self._move(saved.previous, to_host=False)
        result: Tensor = tensor
        return result

    def _move(self, saved: _Saved | None, to_host: bool) -> None:
        if saved is not None and saved.on_host != to_host:
            saved.on_host = to_host
            self._tracer.move(saved.storages, HOST if to_host else LAYERS)


def _call(forward: Callable[..., Any], *inputs: Any) -> Any:
    return forward(*inputs)
