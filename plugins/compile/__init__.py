"""Compile the decoder layers with torch.compile: one program for rows of any length."""

from collections.abc import Generator
from typing import Any, Literal

from plugsft import Machine, Recipe, Run, hookimpl, plugin, say, state


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
    """Compile one program for rows of any length. false compiles one per shape of a row, for packed
    rows with scope = "dataset", which all have one shape."""

    layers: int = state(0)
    """Number of compiled layers."""
    programs: Any = state()
    """Counts the programs of this process."""
    reported: bool = state(False)
    """Whether the programs of the first epoch are reported."""

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Refuse ZeRO-3, and a machine without a compiler."""
        from .compiler import ensure_compilable

        ensure_compilable(recipe, machine)

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Replace each layer's forward by a compiled one; names of weights stay the same."""
        from .layers import compile_layers, set_compiling
        from .programs import Programs

        model = yield
        set_compiling(self.dynamic)
        self.layers = compile_layers(model, self.mode, self.dynamic)
        self.programs = Programs()
        return model

    @hookimpl
    def ready(self) -> None:
        """Compile from now on: the probes before step 1 may have rows of other shapes."""
        from .layers import set_compiling

        set_compiling(True)

    @hookimpl(wrapper=True)
    def use_weights(self, purpose: str) -> Generator[None, Any, Any]:
        """Generate uncompiled: each new token makes another shape."""
        from .layers import set_compiling

        set_compiling(purpose != "generate")
        try:
            return (yield)
        finally:
            set_compiling(True)

    @hookimpl
    def stepped(self, run: Run) -> None:
        """Report the programs after the first epoch: later epochs need no others."""
        if not self.reported and run.epoch >= 1 and run.step < run.steps:
            self.reported = True
            say(f"plugin compile: after the first epoch: {self.programs.describe()}")

    @hookimpl
    def finished(self) -> None:
        """Stop counting programs."""
        self.programs.close()

    @hookimpl
    def summary(self) -> str | None:
        """Report the number of programs, the seconds spent, and why layers ran uncompiled."""
        if not self.layers:
            return None
        if not self.programs.count:
            return f"{self.layers} layers, compiled when they are first called"
        return f"{self.layers} layers, {self.programs.describe()}"
