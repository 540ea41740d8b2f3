"""Gradient checkpointing of decoder layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint, noop_context_fn

from plugsft.kit import decoder_layers

from .selective import Selection


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
