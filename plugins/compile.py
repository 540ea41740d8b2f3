"""Compile the decoder layers with torch.compile: one program for rows of any length."""

import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch._dynamo.callback import CallbackArgs, on_compile_end, on_compile_start
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from plugsft import Recipe, RecipeError, TrainError, hookimpl, plugin, state
from plugsft.kit.model import attend_per_document, decoder_layers

LIMIT = 32
"""Most compiled variants of a function. Beyond its own limit, torch would run it uncompiled."""


@plugin(after=["flash_attention", "gradient_checkpointing", "liger", "lora"])
class Compile:
    """Compile the decoder layers with torch.compile: one program for rows of any length.

    Dropout draws other random numbers than without it.
    """

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """The second tries many kernels, and compiles far longer. CUDA graphs are not supported:
    each graph works for one length only."""
    dynamic: bool = True
    """Compile one program for rows of any length. false compiles one per length, for data whose
    rows all have the same length."""

    layers: int = state(0)
    pieces: int = state(0)
    """Number of compiled programs; `again` counts those that are further variants."""
    again: int = state(0)
    seconds: float = state(0.0)
    began: float = state(0.0)

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse ZeRO-3, and a machine without a compiler."""
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            raise RecipeError(
                "the hooks that ZeRO-3 has inside the layers cannot be compiled; launch with "
                "recipes/accelerate/fsdp2.yaml, or remove [plugins.compile]"
            )
        gpu = torch.cuda.is_available() and recipe.device == "auto"
        name, usual = ("CC", "gcc") if gpu else ("CXX", "g++")
        if not shutil.which(os.environ.get(name, usual)):
            raise RecipeError(
                f"there is no {'C' if gpu else 'C++'} compiler, and torch.compile needs one: "
                f"apt install {usual}, or name yours in the environment: {name}=..."
            )

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Replace each layer's forward by a compiled one; names of weights stay the same."""
        model = yield
        layers = decoder_layers(model, "are known to compile; remove [plugins.compile]")
        self.layers = len(layers)
        torch._dynamo.config.recompile_limit = LIMIT
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        on_compile_start(self.start)
        on_compile_end(self.end)
        known: Any = AttentionInterface
        name, uncompiled = attend_per_document(), torch.compiler.disable
        # A loop over documents would be recompiled for each number of documents.
        known.register(name, uncompiled(known()[name]))  # type: ignore[no-untyped-call]
        programs = {
            kind: torch.compile(body(kind), dynamic=self.dynamic, mode=self.mode)
            for kind in {*map(type, layers)}
        }
        for layer in layers:
            layer.forward = MethodType(partial(run, programs[type(layer)]), layer)
        return model

    @hookimpl
    def verdict(self) -> str | None:
        """Report the number of programs and recompilations, and the seconds spent."""
        if not self.layers:
            return None
        if not self.pieces:
            return f"{self.layers} layers, compiled when they are first called"
        again = f", {self.again} of them again, for other shapes" if self.again else ""
        made = f"{self.pieces} program{'s' if self.pieces > 1 else ''}"
        return f"{self.layers} layers, {made} compiled in {self.seconds:.0f} s{again}"

    def start(self, _: CallbackArgs) -> None:
        """Start the timer of a compilation."""
        self.began = time.perf_counter()

    def end(self, compilation: CallbackArgs) -> None:
        """Count a compilation; ids are FUNCTION/VARIANT, as 3/0, 3/1."""
        self.seconds += time.perf_counter() - self.began
        self.pieces += 1
        self.again += not str(compilation.compile_id).endswith("/0")


class OpaqueLengths:
    """The lengths of documents, hidden from the compiler.

    Programs are specialized on the values of a tuple, which differ in each batch.
    """

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths

    def __iter__(self) -> Iterator[int]:
        return iter(self._lengths)


def body(kind: type[GradientCheckpointingLayer]) -> Callable[..., Any]:
    """Return a layer's forward without its wrapper for gradient checkpointing."""
    code: Callable[..., Any] = kind.forward.__wrapped__  # type: ignore[attr-defined]  # functools
    return code


def run(program: Callable[..., Any], layer: Any, *inputs: Any, **others: Any) -> Any:
    """Run a layer; gradient checkpointing must be outside the compiled program."""
    if isinstance(others.get("documents"), tuple):
        others["documents"] = OpaqueLengths(others["documents"])
    compiled = partial(program, layer, **others)
    try:
        if layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(compiled, *inputs)
        return compiled(*inputs)
    except (FailOnRecompileLimitHit, Unsupported) as error:
        if "recompile" not in f"{type(error)} {error}".lower():
            raise
        raise TrainError(
            f"plugins.compile: a layer's code was compiled {LIMIT} times, for rows of as many "
            "kinds; set dynamic = true, or remove [plugins.compile]"
        ) from error
