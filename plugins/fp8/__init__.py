"""Multiply in float8, in full fine-tuning on recent GPUs: affects results."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from plugsft import Machine, Recipe, hookimpl, plugin, state


@plugin(
    before=["compile"],
    needs={"torchao": "fp8"},
    affects_results=["enabled", "scaling", "keep", "min_size", "emulate"],
)
class Fp8:
    """Multiply in float8, in full fine-tuning on recent GPUs: affects results.

    Inputs, weights and gradients of linear layers are rounded to 8 bits for their products, with
    torchao's kernels. Weights, their gradients and the optimizer stay as they are, and so does
    what is saved. Add [plugins.compile], without which the rounding takes longer than it saves.
    """

    scaling: Literal["rowwise", "tensorwise"] = "rowwise"
    """rowwise: a scale for each token and each output, the more exact. tensorwise: one for each
    tensor, the faster; examples of a micro-batch then round each other's values."""
    keep: NonNegativeInt = 1
    """Number of layers at each end of the model whose products are not rounded."""
    min_size: Annotated[int, Field(ge=16)] = 2048
    """Fewest inputs and outputs of a linear layer; float8 gains nothing for smaller ones."""
    emulate: bool = False
    """Compute with rounded values on any machine, slowly: shows what float8 learns."""

    result: str = state("")

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Refuse a machine without float8, and what cannot be combined with it."""
        from .choose import ensure_usable

        ensure_usable(self, recipe, machine)

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Convert the linear layers; names and weights stay the same."""
        from .convert import convert_layers

        model = yield
        self.result = convert_layers(self, model)
        return model

    @hookimpl
    def summary(self) -> str:
        """Report the number of converted layers, and why others are not."""
        return self.result
