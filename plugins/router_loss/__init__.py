"""Add a loss that trains routers to use all experts evenly: affects results."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from pydantic import PositiveFloat

from plugsft import Batch, Ints, Recipe, RecipeError, hookimpl, plugin, state

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from plugsft.data_kit import Tokens


@plugin(
    after=["lora"],
    affects_results=["enabled", "weight"],
    metrics=["router_loss", "busiest_expert"],
)
class RouterLoss:
    """Add a loss that trains routers to use all experts evenly: affects results.

    Of each example and router it is experts x sum(share x probability): the share of the tokens
    that choose an expert, times its mean probability. So it depends on no other example.
    """

    weight: PositiveFloat = 0.001
    """Factor of the router loss, with the scale of transformers' router_aux_loss_coef."""

    balance: Any = state()
    """Records the routers' outputs, and computes the loss."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse sequences and layers whose routers cannot be seen whole."""
        if shared := recipe.provides("shared_prompts"):
            raise RecipeError(
                f"it needs the prompt's tokens in each answer; remove {shared.option} from "
                f"{shared.table}"
            )
        if compiled := recipe.provides("compiled_layers"):
            raise RecipeError(f"it reads the routers inside the layers; remove {compiled.table}")
        from plugsft.kit import meta_model

        from .routers import find_routers

        if (model := meta_model(recipe)) is not None:
            find_routers(model)

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Find the model's routers, and record their outputs from now on."""
        from .routers import Balance, find_routers

        model = yield
        self.balance = Balance(find_routers(model))
        return model

    @hookimpl(wrapper=True)
    def collate(self, tokens: Tokens, examples: Ints) -> Generator[None, Batch, Batch]:
        """Add what each sequence counts in the loss."""
        from .routers import sequence_shares

        batch = yield
        return {**batch, "_router_shares": sequence_shares(tokens, examples)}

    @hookimpl(wrapper=True)
    def step(
        self, model: Module, batch: Batch, denominator: float
    ) -> Generator[None, Tensor, Tensor]:
        """Add the router loss in training; evaluations only measure it."""
        with self.balance.recording():
            loss = yield
        router_loss: Tensor = self.balance.sum_losses(batch)
        return loss + self.weight / denominator * router_loss if model.training else loss

    @hookimpl
    def add_metrics(self) -> dict[str, Any]:
        """Return the sums of the router loss, and of the busiest experts' shares of tokens."""
        return dict(self.balance.take_sums())

    @hookimpl
    def summary(self) -> str | None:
        """Report the number of routers, and the loss of perfect balance."""
        return f"weight {self.weight:g}; {self.balance.description}" if self.balance else None
