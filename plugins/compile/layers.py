"""Compiled decoder layers, and the count of their compilations."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch._dynamo.callback import CallbackArgs, on_compile_end, on_compile_start
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from plugsft import PluginError
from plugsft.kit import attend_per_document, decoder_layers

LIMIT = 32
"""Most compiled variants of a function. Beyond its own limit, torch would run it uncompiled."""


class Compilations:
    """Counts all compilations of this process, and their seconds."""

    def __init__(self) -> None:
        self.count, self.repeated, self.seconds = 0, 0, 0.0
        self._started = 0.0
        on_compile_start(self._start)
        on_compile_end(self._end)

    def _start(self, _: CallbackArgs) -> None:
        self._started = time.perf_counter()

    def _end(self, compilation: CallbackArgs) -> None:
        self.seconds += time.perf_counter() - self._started
        self.count += 1
        # The id is FUNCTION/VARIANT: 3/0, 3/1.
        self.repeated += not str(compilation.compile_id).endswith("/0")


def compile_layers(model: Any, mode: str, dynamic: bool) -> int:
    """Replace each decoder layer's forward by a compiled one; return the number of layers."""
    layers = decoder_layers(model, "are known to compile; remove [plugins.compile]")
    torch._dynamo.config.recompile_limit = LIMIT
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    _exclude_attention()
    programs = {
        kind: torch.compile(_forward_of(kind), dynamic=dynamic, mode=mode)
        for kind in {*map(type, layers)}
    }
    for layer in layers:
        layer.forward = MethodType(partial(run_layer, programs[type(layer)]), layer)
    return len(layers)


def _exclude_attention() -> None:
    """Run attention per document uncompiled: its loop differs for each number of documents."""
    interface: Any = AttentionInterface
    name, uncompiled = attend_per_document(), torch.compiler.disable
    interface.register(name, uncompiled(interface()[name]))  # type: ignore[no-untyped-call]


def _forward_of(kind: type[GradientCheckpointingLayer]) -> Callable[..., Any]:
    """Return a layer's forward without its wrapper for gradient checkpointing."""
    forward: Callable[..., Any] = kind.forward.__wrapped__  # type: ignore[attr-defined]  # functools
    return forward


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
    try:
        if layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(compiled, *inputs)
        return compiled(*inputs)
    except (FailOnRecompileLimitHit, Unsupported) as error:
        if "recompile" not in f"{type(error)} {error}".lower():
            raise
        raise PluginError(
            f"plugins.compile: a layer was compiled {LIMIT} times, for rows of different shapes; "
            "set dynamic = true, or remove [plugins.compile]"
        ) from error
