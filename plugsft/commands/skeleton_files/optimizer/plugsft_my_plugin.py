"""Train with Adafactor, which needs far less memory than AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugsft import RecipeError, Train, hookimpl, plugin

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


@plugin(affects_results=["decay"])
class MyPlugin:
    """Train with Adafactor, which needs far less memory than AdamW."""

    decay: float = -0.8
    """How fast old gradients are forgotten, as a power of the step; below 0."""

    @hookimpl
    def check(self) -> None:
        """Refuse options that make no sense."""
        if self.decay >= 0:
            raise RecipeError(f"decay: given {self.decay}; it should be below 0")

    @hookimpl
    def optimizer(self, model: Module, train: Train) -> Optimizer:
        """Create the optimizer of all trained weights; its state is kept in checkpoints."""
        from torch.optim import Adafactor  # not at the top: reading a recipe needs no torch

        trained = [weight for weight in model.parameters() if weight.requires_grad]
        return Adafactor(
            trained,
            lr=train.learning_rate,
            weight_decay=train.weight_decay,
            beta2_decay=self.decay,
        )
