"""Store only the input of each layer; recompute the rest in the backward pass."""

from collections.abc import Generator
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from plugsft import hookimpl, plugin, state


@plugin(after=["lora"])
class GradientCheckpointing:
    """Store only the input of each layer; recompute the rest in the backward pass."""

    every: Annotated[int, Field(ge=1)] = 1
    """1: all layers, for the least memory. 2: every second layer, for half of the recomputation."""

    said: str = state("")

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Turn on gradient checkpointing for the chosen layers, in training only."""
        from torch.utils.checkpoint import checkpoint

        from plugsft.kit.model import decoder_layers

        model = yield
        layers = decoder_layers(
            model,
            "can be recomputed; remove [plugins.gradient_checkpointing], and lower capacity "
            "or train.micro_batch if memory is short",
        )
        chosen = layers[:: self.every]
        for layer in chosen:
            # Reentrant checkpoints lose gradients if no input of a layer requires one.
            recompute: Any = partial(checkpoint, use_reentrant=False)
            layer._gradient_checkpointing_func = recompute
            layer.gradient_checkpointing = True
        self.said = f"{len(chosen)} of {len(layers)} layers computed again in the backward pass"
        return model

    @hookimpl
    def verdict(self) -> str | None:
        """Report the number of layers."""
        return self.said or None
