"""Gradient checkpointing of decoder layers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from ctypes import string_at
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from plugsft.kit import decoder_layers

from .selective import Reuse, Selection, Store

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def checkpoint_layers(model: Any, every: int, selective: str | None) -> tuple[int, int]:
    """Recompute every n-th layer in the backward pass; return the counts: chosen, all."""
    layers = decoder_layers(
        model,
        "can be recomputed; remove [plugins.gradient_checkpointing], and lower capacity "
        "or train.micro_batch if memory is short",
    )
    chosen = layers[::every]
    selection = Selection(selective) if selective else None
    for layer in chosen:
        layer._gradient_checkpointing_func = partial(run_layer, selection)
        layer.gradient_checkpointing = True
    return len(chosen), len(layers)


def run_layer(selection: Selection | None, layer: Any, *inputs: Any) -> Any:
    """Run a layer that is recomputed in the backward pass."""
    device = next(tensor.device for tensor in inputs if isinstance(tensor, Tensor))
    return checkpoint(
        layer,
        *inputs,
        # Reentrant checkpoints lose gradients if no input of a layer requires one.
        use_reentrant=False,
        # `RandomNumbers` repeats them, and costs little where a layer draws none.
        preserve_rng_state=False,
        context_fn=partial(contexts, device, selection),
    )


def contexts(device: torch.device, selection: Selection | None) -> Contexts:
    """Return the contexts of a layer's forward pass and of its recomputation."""
    numbers = RandomNumbers(device)
    if selection is None:
        return numbers.watch(), numbers.repeat()
    store = Store(selection)
    reuse = Reuse(selection, store.outputs)
    return nested(numbers.watch(), store), nested(numbers.repeat(), reuse)


@contextmanager
def nested(*managers: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter several contexts, one inside the other."""
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


class RandomNumbers:
    """Repeats the random numbers that a layer drew, if it drew any."""

    def __init__(self, device: torch.device) -> None:
        self._modules: list[Any] = [torch]
        if device.type != "cpu":
            self._modules.append(torch.get_device_module(device))
        self._before: list[Tensor] = []
        """States of the generators before the layer; empty if it drew nothing."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Notice whether the layer draws random numbers."""
        before = self._states()
        yield
        if contents(before) != contents(self._states()):
            self._before = before

    @contextmanager
    def repeat(self) -> Iterator[None]:
        """Draw the same numbers again."""
        if not self._before:
            yield
            return
        after = self._states()
        self._restore(self._before)
        try:
            yield
        finally:
            self._restore(after)

    def _states(self) -> list[Tensor]:
        return [module.get_rng_state() for module in self._modules]

    def _restore(self, states: list[Tensor]) -> None:
        for module, state in zip(self._modules, states, strict=True):
            module.set_rng_state(state)


def contents(states: list[Tensor]) -> list[bytes]:
    """Return the bytes of states, which are on the CPU, without an operation of torch."""
    return [string_at(state.data_ptr(), state.nbytes) for state in states]
