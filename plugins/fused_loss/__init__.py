"""Compute the loss from hidden states in chunks, without a micro-batch's whole logits."""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from plugsft import Batch, Recipe, RecipeError, RunModel, hookimpl, plugin, state

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from plugsft.data_kit import Tokens

    from .loss import HeadLoss


def metrics_of(plugin: FusedLoss, recipe: Recipe) -> list[str]:
    """Name the metric that is counted by our kernel, in losses of all targets."""
    scored = recipe.provides("preference_pairs") or recipe.provides("labelled_answers")
    counts = plugin.kernel in ("auto", "torch") and not scored
    return ["mean_token_accuracy"] if counts else []


@plugin(provides={"fused_head": "chunk"}, metrics=metrics_of)
class FusedLoss:
    """Compute the loss from hidden states in chunks, without a micro-batch's whole logits.

    Only trained positions reach the head, and gradients are computed in the forward pass. A scale
    or soft cap of the logits is measured, and applied in the loss. Before step 1 the loss is
    compared with the plain loss on the run's own model.
    """

    kernel: Literal["auto", "torch", "cut_cross_entropy", "liger"] = "auto"
    """auto: cut_cross_entropy if there is a GPU and a release of it that sums gradients in float32,
    otherwise torch. auto never chooses liger: on an H100 it took 193 ms where torch took 144. With
    a frozen head, as under adapters, it took 66 and torch 107."""
    chunk: Annotated[int, Field(ge=1)] | None = None
    """Positions per chunk, for kernel = "torch". Default: 256 MiB of logits, 1 GiB on a GPU."""

    package: str = state("")
    """The package whose kernel is used, or "" for ours."""
    chosen: str = state("torch kernel")
    """The kernel, and the reason for it."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Choose the kernel; refuse one that cannot run, and options without effect."""
        scored = recipe.provides("preference_pairs") or recipe.provides("labelled_answers")
        if self.kernel == "liger" and scored:
            raise RecipeError(
                f'kernel = "liger" gives all positions the same weight, but {scored.table} weighs '
                'each answer; set kernel = "auto"'
            )
        name = "cut_cross_entropy" if self.kernel == "auto" else self.kernel
        if name == "torch":
            return
        from .loss import why_unavailable

        reason = why_unavailable(name, asked=self.kernel != "auto")
        if self.kernel == "auto" and (reason or self.chunk):
            self.chosen = f"torch kernel ({reason or 'chunk is set'})"
            return
        if reason:
            raise RecipeError(f'kernel = "{name}" cannot run: {reason}; or set kernel = "auto"')
        if self.chunk:
            raise RecipeError(f'chunk has no effect with kernel = "{name}"; remove it')
        self.package, self.chosen = name, f"{name} kernel"

    @hookimpl(wrapper=True)
    def add_columns(self, model: RunModel) -> Generator[None, Tokens, Tokens]:
        """Measure the transform of the logits, and compare the loss, on all ranks together."""
        if not self.loss.proved:
            self.loss.prove(model.module)
        tokens = yield
        weights = tokens.columns.get("weight")
        # Examples of weight 0 reach no batch.
        weighs = weights is not None and not ((weights == 0) | (weights == 1)).all()
        if self.package == "liger" and weighs:
            raise RecipeError(
                'plugins.fused_loss: kernel = "liger" gives all positions the same weight, but the '
                'rows have weights; set kernel = "auto", or data.ignore = ["weight"]'
            )
        self.loss.counts &= not weighs
        return tokens

    @hookimpl
    def add_metrics(self) -> dict[str, Tensor]:
        """Count the targets that the model found likeliest, where all weigh the same."""
        return self.loss.take_hits()

    @hookimpl
    def token_nll(self, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Compute the losses inside the model's head.

        The whole model is called, so that its wrappers run and gather the head's weight. The head
        returns zeros with the gradients of the losses; the losses themselves bypass whatever the
        model does to its logits.
        """
        return self.loss.token_nll(model, batch, summed)

    @hookimpl
    def summary(self) -> str:
        """Report the kernel and the comparison."""
        proved = self.loss.proved if "loss" in vars(self) else ""
        return "; ".join(filter(None, [self.chosen, proved]))

    @cached_property
    def loss(self) -> HeadLoss:
        """What computes the losses, made once the model is there."""
        from .loss import HeadLoss

        return HeadLoss(self.package, self.chunk)
