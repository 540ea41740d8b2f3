"""What a step holds at each moment, and what it computes, found by a run of tensors without memory.

The model's own code runs, forward and backward, on tensors that have shapes and nothing behind
them: what any family, attention or plugin keeps is seen, and nothing is guessed.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...base.types import Ints

LAYERS, HEAD = 0, 1
"""Whose memory it is: the layers' (and embeddings'), or what comes behind them."""
ATTENTION = "scaled_dot_product"
BACKWARD = 2.5
"""Attention's backward pass makes five products of matrices, its forward pass two."""


@dataclass(frozen=True)
class Trace:
    """One micro-batch, there and back."""

    held: Ints
    """Bytes of activations at each moment: of the layers and of the loss head."""
    grads: Ints
    """Bytes of gradients that are done by then."""
    turn: int
    """The moment at which the backward pass begins."""
    products: float
    """Floating-point operations of matrix products, there and back, recomputing included."""
    attention: float
    """Those of attention."""
    moved: float
    """Bytes that all other operations read and write."""
    calls: int
    """Operations: each is a launch on a GPU."""


@dataclass
class _Told:
    """Where memory was taken, and how much."""

    size: int
    owner: int
    watch: Any = field(repr=False)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Notes every tensor that is made, until it is gone."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self._live: dict[int, _Told] = {}
        self._known = {one.untyped_storage()._cdata for one in known}
        self.owner, self.held, self.done = LAYERS, [0, 0], 0
        self.moments: list[tuple[int, ...]] = []
        self.products = self.attention = self.moved = 0.0
        self.calls = self.turn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Do it, and note what came of it."""
        kwargs = kwargs or {}
        made: object = func(*args, **kwargs)
        tensors = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        fresh = [one for one in tensors if self.take(one)]
        if fresh or func._schema.is_mutable:
            self._count(func, args, kwargs, made, tensors)
        return made

    def take(self, one: Tensor) -> bool:
        """Note a tensor whose memory is new."""
        storage = one.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._live:
            return False
        watch = weakref.ref(storage, lambda _: self._gone(key))
        self._live[key] = _Told(size, self.owner, watch)
        self.held[self.owner] += size
        self.moments.append((*self.held, self.done))
        return True

    def finish(self, grad: Tensor) -> None:
        """Count a gradient that is done apart from activations."""
        key = grad.untyped_storage()._cdata
        if (told := self._live.pop(key, None)) is not None:
            self.held[told.owner] -= told.size
            self.done += told.size
            self._known.add(key)
        self.moments.append((*self.held, self.done))

    def _gone(self, key: int) -> None:
        if (told := self._live.pop(key, None)) is not None:
            self.held[told.owner] -= told.size

    def _count(self, func: Any, args: Any, kwargs: Any, made: Any, tensors: list[Tensor]) -> None:
        self.calls += 1
        packet = func._overloadpacket
        if ATTENTION in str(packet):
            self.attention += attending(args, "backward" in str(packet))
        elif "grouped_mm" in str(packet):  # experts: each row is sent to one of them
            self.products += 2.0 * args[0].numel() * args[1].shape[-1]
        elif packet in flop_registry:
            self.products += flop_registry[packet](*args, **kwargs, out_val=made)
        else:
            read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            self.moved += sum(one.numel() * one.element_size() for one in [*read, *tensors])


def attending(args: Any, back: bool) -> float:
    """Return what a kernel for attention computes; half of it where nothing looks ahead."""
    query, key = args[1:3] if back else args[:2]
    causal = any(one is True for one in args)
    flops = 4.0 * math.prod(query.shape) * key.shape[2] * (0.5 if causal else 1.0)
    return float(flops * (BACKWARD if back else 1.0))


def through(model: Any, layers: list[Any], loss: Callable[[], Tensor]) -> Trace:
    """Compute a loss and its gradients, and note what is held at each moment."""
    known = [*model.parameters(), *model.buffers()]
    watch = Watch(known)

    def begin(_module: Any, _inputs: Any, output: Any) -> None:
        if watch.turn:
            return  # a layer that is computed again
        watch.owner = HEAD
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(end)

    def end(_: Tensor) -> None:
        watch.owner = LAYERS

    hooks = [layers[-1].register_forward_hook(begin)] if layers else []
    for one in model.parameters():
        one.grad = None
        if one.requires_grad:
            hooks.append(one.register_post_accumulate_grad_hook(lambda one: watch.finish(one.grad)))
    with watch:
        total = loss()
        watch.turn = len(watch.moments)
        total.backward()  # type: ignore[no-untyped-call]  # untyped upstream
        del total
    for hook in hooks:
        hook.remove()
    for one in model.parameters():
        one.grad = None
    moments = np.array(watch.moments, np.int64).reshape(-1, 3)
    return Trace(
        moments[:, :2].T.copy(),
        moments[:, 2].copy(),
        min(watch.turn, len(moments) - 1),
        watch.products,
        watch.attention,
        watch.moved,
        watch.calls,
    )
