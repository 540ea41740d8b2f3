"""Trace the memory of one micro-batch, with tensors that have shapes but no data.

The model's own code runs, forward and backward, so that every family, attention and plugin is
counted without formulas.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...base.types import Ints

LAYERS, HEAD, HOST = 0, 1, 2
"""Owners of activations: embeddings and layers, the loss head after them, or host memory."""
MIN_BYTES = 1_000_000
"""Smallest activation that is moved by default."""


@dataclass(frozen=True)
class Trace:
    """The memory of one micro-batch, at each allocation."""

    activations: Ints
    """[owner, moment]: bytes of the layers and of the loss head."""
    gradients: Ints
    """[moment]: bytes of finished gradients."""
    host: int
    """Most bytes in host memory."""


@dataclass
class _Allocation:
    """A live tensor's memory."""

    size: int
    owner: int
    watch: Any = field(repr=False)

    @property
    def counted(self) -> int:
        """Bytes; torch rounds pinned host memory up to a power of two."""
        return 1 << (self.size - 1).bit_length() if self.owner == HOST else self.size


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Records every allocation of a tensor until it is freed."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self._live: dict[int, _Allocation] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self.owner, self.bytes, self.gradients = LAYERS, [0, 0, 0], 0
        self.moments: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Run the operation and record the tensors that it makes."""
        result: object = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._record(tensor)
        return result

    def _record(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._live:
            return
        watch = weakref.ref(storage, lambda _: self._free(key))
        self._live[key] = _Allocation(size, self.owner, watch)
        self.bytes[self.owner] += size
        self.moments.append((*self.bytes, self.gradients))

    def finish_gradient(self, gradient: Tensor) -> None:
        """Count a finished gradient apart from activations."""
        key = gradient.untyped_storage()._cdata
        if (allocation := self._live.pop(key, None)) is not None:
            self.bytes[allocation.owner] -= allocation.counted
            self.gradients += allocation.size
            self._known.add(key)
        self.moments.append((*self.bytes, self.gradients))

    def move(self, storages: set[int], owner: int) -> None:
        """Count activations for another owner."""
        for key in storages & self._live.keys():
            allocation = self._live[key]
            self.bytes[allocation.owner] -= allocation.counted
            allocation.owner = owner
            self.bytes[owner] += allocation.counted
        self.moments.append((*self.bytes, self.gradients))

    def _free(self, key: int) -> None:
        if (allocation := self._live.pop(key, None)) is not None:
            self.bytes[allocation.owner] -= allocation.counted


def trace_memory(
    model: Any, layers: list[Any], loss: Callable[[], Tensor], start: Callable[[Tracer], None]
) -> Trace:
    """Compute a loss and its gradients; record the memory at each moment."""
    tracer = Tracer([*model.parameters(), *model.buffers()])
    start(tracer)
    in_backward = False

    def enter_head(_module: Any, _inputs: Any, output: Any) -> None:
        if in_backward:
            return  # a layer that is recomputed
        tracer.owner = HEAD
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(leave_head)

    def leave_head(_: Tensor) -> None:
        tracer.owner = LAYERS

    hooks = [layers[-1].register_forward_hook(enter_head)] if layers else []
    for parameter in model.parameters():
        parameter.grad = None
        if parameter.requires_grad:
            hooks.append(
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter: tracer.finish_gradient(parameter.grad)
                )
            )
    with tracer:
        total = loss()
        in_backward = True
        total.backward()  # type: ignore[no-untyped-call]  # untyped upstream
        del total
    for hook in hooks:
        hook.remove()
    for parameter in model.parameters():
        parameter.grad = None
    moments = np.array(tracer.moments, np.int64).reshape(-1, 4)
    host = int(moments[:, HOST].max(initial=0))
    return Trace(moments[:, :HOST].T.copy(), moments[:, 3].copy(), host)


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
