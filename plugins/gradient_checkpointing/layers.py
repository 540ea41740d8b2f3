"""Gradient checkpointing of decoder layers."""

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from plugsft.kit import decoder_layers


def checkpoint_layers(model: Any, every: int) -> tuple[int, int]:
    """Recompute every n-th layer in the backward pass; return the counts: chosen, all."""
    layers = decoder_layers(
        model,
        "can be recomputed; remove [plugins.gradient_checkpointing], and lower capacity "
        "or train.micro_batch if memory is short",
    )
    chosen = layers[::every]
    for layer in chosen:
        # Reentrant checkpoints lose gradients if no input of a layer requires one.
        recompute: Any = partial(checkpoint, use_reentrant=False)
        layer._gradient_checkpointing_func = recompute
        layer.gradient_checkpointing = True
    return len(chosen), len(layers)
