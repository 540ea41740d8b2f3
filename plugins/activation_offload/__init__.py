"""Move what layers save for the backward pass to host memory, and back in time."""

from collections.abc import Generator
from typing import Any

from pydantic import NonNegativeInt

from plugsft import Machine, Recipe, hookimpl, plugin, state


@plugin(after=["*"], provides={"offloaded_activations": "min_bytes"})
class ActivationOffload:
    """Move what layers save for the backward pass to host memory, and back in time.

    Copies run on a stream of their own, while the next layer computes. With gradient checkpointing
    only the inputs of layers move, which a GPU's link to the host can keep up with.
    """

    min_bytes: NonNegativeInt = 1_000_000
    """Smallest activation that is moved."""

    offload: Any = state()
    """Moves the activations."""
    steps: int = state(0)

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Refuse what cannot work without gradient checkpointing."""
        from .layers import ensure_possible

        ensure_possible(recipe, machine)

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Wrap each layer, in training only."""
        from .layers import Offload

        model = yield
        self.offload = Offload(model, self.min_bytes)
        return model

    @hookimpl
    def stepped(self) -> None:
        """Count the step."""
        self.steps += 1

    @hookimpl
    def summary(self) -> str | None:
        """Report the bytes that were moved."""
        if self.offload is None:
            return None
        total = len(self.offload.layers)
        line = f"activations of {total - 1} of {total} layers wait in host memory"
        if not self.steps:
            return f"{line}, from {self.min_bytes:,} bytes on (min_bytes)"
        moved = self.offload.moved / self.steps
        if not moved:
            return f"nothing was moved: no activation has {self.min_bytes:,} bytes (min_bytes)"
        gain = "; a CPU gains nothing by it" if self.offload.on_cpu else ""
        return f"{line}; {moved / 2**20:,.1f} MiB a step moved there and back{gain}"
