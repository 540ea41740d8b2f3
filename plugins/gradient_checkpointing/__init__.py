"""Store only the input of each layer; recompute the rest in the backward pass."""

from collections.abc import Generator
from typing import Annotated, Any, Literal

from pydantic import Field

from plugsft import Recipe, RecipeError, hookimpl, plugin, state


@plugin(after=["lora"], provides={"recomputed_activations": "every"})
class GradientCheckpointing:
    """Store only the input of each layer; recompute the rest in the backward pass."""

    every: Annotated[int, Field(ge=1)] = 1
    """1: all layers, for the least memory. 2: every second layer, for half of the recomputation."""
    selective: Literal["attention", "ops"] | None = None
    """Outputs that are stored too, and not recomputed. attention: those of attention. ops: those of
    attention and of matrix products, which leaves little to recompute, for more memory."""

    result: str = state("")

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse selective checkpoints whose operations cannot be seen."""
        option = f'plugins.gradient_checkpointing: selective = "{self.selective}"'
        compiled = recipe.provides("compiled_layers")
        if self.selective and compiled:
            raise RecipeError(
                f"{option} sees no operations inside compiled layers; remove selective, or "
                f"{compiled.table}"
            )
        kernels = recipe.providers("fused_kernels")
        if self.selective == "ops" and kernels:
            # Liger's rotary embedding rotates queries and keys in the memory of their product.
            raise RecipeError(
                f"{option} would reuse products that kernels change in place; set selective = "
                f'"attention", or remove {kernels[0].table}'
            )

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Turn on gradient checkpointing for the chosen layers, in training only."""
        from .layers import checkpoint_layers

        model = yield
        chosen, total = checkpoint_layers(model, self.every, self.selective)
        self.result = f"{chosen} of {total} layers recomputed in the backward pass"
        if self.selective:
            products = " and matrix products" * (self.selective == "ops")
            self.result += f", with stored outputs of attention{products}"
        return model

    @hookimpl
    def summary(self) -> str:
        """Report the number of layers."""
        return self.result
