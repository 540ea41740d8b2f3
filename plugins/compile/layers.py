"""Compiled decoder layers."""

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from plugsft.kit import decoder_layers

BACKEND = "inductor"
CHECKPOINTS_IN_CALL = "__call__" in vars(GradientCheckpointingLayer)
"""Whether transformers checkpoints in a layer's call (5.17), not in its forward (5.23)."""


def compile_layers(model: Any, mode: str, dynamic: bool) -> int:
    """Replace each decoder layer's forward by a compiled one; return the number of layers."""
    layers = decoder_layers(model, "are known to compile; remove [plugins.compile]")
    programs = {
        kind: torch.compile(forward_of(kind), dynamic=dynamic, mode=mode, backend=BACKEND)
        for kind in {*map(type, layers)}
    }
    for layer in layers:
        layer.forward = MethodType(partial(run_layer, programs[type(layer)]), layer)
    return len(layers)


def set_compiling(compiling: bool) -> None:
    """Run layers by their programs, or uncompiled."""
    torch.compiler.set_stance("default" if compiling else "force_eager")


def forward_of(kind: type[GradientCheckpointingLayer]) -> Callable[..., Any]:
    """Return a layer's forward without transformers' wrapper for gradient checkpointing."""
    forward: Any = kind.forward
    # Another decorator's wrapper stays: it belongs to the layer.
    return forward if CHECKPOINTS_IN_CALL else forward.__wrapped__  # type: ignore[no-any-return]


class OpaqueLengths:
    """The lengths of documents, hidden from the compiler.

    Programs are specialized on the values of a tuple, which differ in each batch.
    """

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths

    def __iter__(self) -> Iterator[int]:
        return iter(self._lengths)


def run_layer(program: Callable[..., Any], layer: Any, *inputs: Any, **options: Any) -> Any:
    """Run a compiled layer; gradient checkpointing must be outside the compiled program."""
    if isinstance(options.get("documents"), tuple):
        options["documents"] = OpaqueLengths(options["documents"])
    compiled = partial(program, layer, **options)
    if layer.gradient_checkpointing and layer.training and not CHECKPOINTS_IN_CALL:
        return layer._gradient_checkpointing_func(compiled, *inputs)
    return compiled(*inputs)
