"""Compile the decoder layers with torch.compile: one program for rows of any length."""

from collections.abc import Generator
from typing import Any, Literal

from plugsft import Recipe, hookimpl, plugin, state


@plugin(
    after=["flash_attention", "gradient_checkpointing", "liger", "lora"],
    provides={"compiled_layers": None},
)
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
    """Number of compiled layers."""
    compilations: Any = state()
    """Counts the compilations of this process."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse ZeRO-3, and a machine without a compiler."""
        from .compiler import ensure_compilable

        ensure_compilable(recipe)

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Replace each layer's forward by a compiled one; names of weights stay the same."""
        from .layers import Compilations, compile_layers

        model = yield
        self.layers = compile_layers(model, self.mode, self.dynamic)
        self.compilations = Compilations()
        return model

    @hookimpl
    def summary(self) -> str | None:
        """Report the number of programs and recompilations, and the seconds spent."""
        if not self.layers:
            return None
        done = self.compilations
        if not done.count:
            return f"{self.layers} layers, compiled when they are first called"
        programs = f"{done.count} program{'s' if done.count > 1 else ''}"
        others = f", {done.repeated} of them for other shapes" if done.repeated else ""
        return f"{self.layers} layers, {programs} compiled in {done.seconds:.0f} s{others}"
