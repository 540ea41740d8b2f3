"""Store only the input of each layer; recompute the rest in the backward pass."""

from collections.abc import Generator
from typing import Annotated, Any

from pydantic import Field

from plugsft import hookimpl, plugin, state


@plugin(after=["lora"], provides={"recomputed_activations": "every"})
class GradientCheckpointing:
    """Store only the input of each layer; recompute the rest in the backward pass."""

    every: Annotated[int, Field(ge=1)] = 1
    """1: all layers, for the least memory. 2: every second layer, for half of the recomputation."""

    result: str = state("")

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Turn on gradient checkpointing for the chosen layers, in training only."""
        from .layers import checkpoint_layers

        model = yield
        chosen, total = checkpoint_layers(model, self.every)
        self.result = f"{chosen} of {total} layers recomputed in the backward pass"
        return model

    @hookimpl
    def summary(self) -> str | None:
        """Report the number of layers."""
        return self.result or None
