"""Train less on tokens that the model knows (focal loss)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugsft import Batch, TokenNll, hookimpl, plugin, state

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


@plugin(affects_results=["gamma"], metrics=["nll"])
class MyPlugin:
    """Train less on tokens that the model knows (focal loss)."""

    gamma: float = 2.0
    """How much less; 0 is the usual loss."""

    nll: Any = state(0.0)
    """The sum of the usual loss since the last call of `add_metrics`."""

    @hookimpl
    def step(self, model: Module, batch: Batch, denominator: float, token_nll: TokenNll) -> Tensor:
        """Return the sum over this micro-batch's targets, divided by `denominator`."""
        nll = token_nll(model=model, batch=batch, summed=False)  # -log p of each target
        self.nll += nll.detach().sum()
        unknown = 1 - nll.neg().exp()
        return (unknown**self.gamma * nll).sum() / denominator

    @hookimpl
    def add_metrics(self) -> dict[str, Tensor]:
        """Return the sum; the core adds up all ranks and divides by `denominator`."""
        nll, self.nll = self.nll, 0.0
        return {"nll": nll}
