"""Add noise to the embeddings in training (NEFTune, arXiv 2310.05914): affects results."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from plugsft import hookimpl, plugin

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


@plugin(affects_results=["alpha"])
class Neftune:
    """Add noise to the embeddings in training (NEFTune): affects results."""

    # Without a default: a run cannot resume without the plugin, either.
    alpha: Annotated[float, Field(gt=0)]
    """Size of the noise; the paper tries 5, 10 and 15."""

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Change what the embedding layer returns."""
        model = yield
        model.get_input_embeddings().register_forward_hook(self.add_noise)
        return model

    def add_noise(self, module: Module, _: object, embeddings: Tensor) -> Tensor:
        """Add uniform noise, which the run seeds at each step; none in evaluations."""
        if not module.training:
            return embeddings
        _, length, width = embeddings.shape
        limit = self.alpha / (length * width) ** 0.5
        return embeddings + embeddings.new_empty(embeddings.shape).uniform_(-limit, limit)
