"""Keep what enters a layer only, and compute the rest of it again for the backward pass."""

from collections.abc import Generator
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from plugsft import hookimpl, plugin, state


@plugin(after=["lora"])
class GradientCheckpointing:
    """Keep what enters a layer only, and compute the rest of it again for the backward pass."""

    every: Annotated[int, Field(ge=1)] = 1
    """1: all layers, for the least memory. 2: every second one, for half of the computing."""

    said: str = state("")

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Mark the layers that are computed again; a mark works in training only."""
        from torch.utils.checkpoint import checkpoint

        from plugsft.kit.model import decoder_layers

        model = yield
        layers = decoder_layers(
            model,
            "can be computed again; remove [plugins.gradient_checkpointing], and lower capacity "
            "or train.micro_batch if memory is short",
        )
        chosen = layers[:: self.every]
        for layer in chosen:
            # The reentrant kind loses gradients where nothing that enters a layer is trained.
            again: Any = partial(checkpoint, use_reentrant=False)
            layer._gradient_checkpointing_func = again
            layer.gradient_checkpointing = True
        self.said = f"{len(chosen)} of {len(layers)} layers computed again in the backward pass"
        return model

    @hookimpl
    def verdict(self) -> str | None:
        """Say how many layers."""
        return self.said or None
