"""Learn which of two answers is preferred (DPO, SimPO, ORPO, ...): affects results."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, FiniteFloat

from plugsft import (
    AnswerLoss,
    Batch,
    Data,
    Place,
    Ranks,
    Recipe,
    Rendered,
    RunModel,
    TokenNll,
    hookimpl,
    plugin,
    state,
)

from .losses import LOSSES, LossName, describe, ensure_options_work, metrics_of, options_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from plugsft.data_kit import Tokenizer, Tokens


@plugin(
    provides={
        "preference_pairs": None,
        "reference_model": "reference",
        "shared_prompts": "share_prompt",
        "weighted_examples": None,
    },
    affects_results=["loss", "beta", "gamma", "alpha", "label_smoothing", "nll", "reference"],
    affects_tokens=[],
    metrics=metrics_of,
)
class Dpo(AnswerLoss):
    """Learn which of two answers is preferred (DPO, SimPO, ORPO, ...): affects results.

    A row has a prompt, a chosen and a rejected answer; the loss of a step is the mean over its
    pairs, each times its weight. The reference is the model before training: with adapters the
    base, else a frozen copy. With [plugins.dpo_reference] its log-probabilities are computed once,
    and no copy is loaded. cpo, cpo_hinge, cpo_ipo, simpo and orpo have no reference.
    """

    loss: LossName = "sigmoid"
    """length_normalized, ipo, cpo_ipo, simpo and orpo compare log-probabilities per token, the
    others those of whole answers. docs/preferences.md has the formulas."""
    beta: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Factor of the compared log-probabilities; with ipo and cpo_ipo, 1 / (2 x the wanted margin);
    with orpo, the weight of the odds ratio. Default: 0.1; length_normalized: 5; simpo: 2."""
    gamma: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """The wanted margin of beta x log-probabilities, for simpo. Default: 1."""
    alpha: FiniteFloat | None = None
    """Shape of the reward, for simpo: AlphaPO's (1 - p^-alpha) / alpha. Default: 0, log p."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """Assumed share of mislabelled pairs, for sigmoid, length_normalized, cpo and simpo.
    Default: 0."""
    nll: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Weight of an additional loss: the chosen answer's mean loss per token. Default: 0, with cpo,
    cpo_hinge, cpo_ipo and orpo 1."""
    reference: Place | None = None
    """Another reference: a folder or a name on the hub."""
    share_prompt: bool = False
    """Compute the prompt of a pair once, for both answers; for packed rows."""

    sharing: str = state("")
    """What shared prompts save, once they are tested."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse options that would have no effect."""
        super().check(recipe)
        ensure_options_work(self, recipe)

    @hookimpl
    def render(self, rows: list[dict[str, Any]], tokenizer: Tokenizer, data: Data) -> Rendered:
        """Render each row as two texts with the same prompt."""
        from plugsft.data_kit import render_pairs

        return render_pairs(rows, tokenizer, data)

    @hookimpl(wrapper=True)
    def add_columns(self, model: RunModel, ranks: Ranks) -> Generator[None, Tokens, Tokens]:
        """Share prompts."""
        from plugsft.data_kit import share_prompts

        from .shared_prompts import ensure_same_losses

        tokens = yield from super().add_columns(model, ranks)
        if not self.share_prompt:
            return tokens
        shared = share_prompts(tokens)
        self.sharing = self.sharing or ensure_same_losses(model, tokens, shared)
        return shared

    def has_reference(self) -> bool:
        """Tell whether the loss has a reference."""
        return LOSSES[self.loss].reference

    def losses(
        self, model: Module, batch: Batch, token_nll: TokenNll
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compare the answers of each pair, as the model and the reference score them."""
        from .objective import compare, ensure_initial_loss

        answers = self.score(model, batch, token_nll)
        log_probs, gains = (values.view(-1, 2) for values in answers)
        lengths = batch["_targets"].view(-1, 2)
        losses, metrics = compare(self, log_probs, gains, lengths)
        if self.is_first(model):
            ensure_initial_loss(self, losses)
        if weight := options_of(self).nll:
            metrics["nll"] = -log_probs[:, 0] / lengths[:, 0]
            losses = losses + weight * metrics["nll"]
        return losses, metrics

    @hookimpl
    def summary(self) -> str:
        """Report the loss, the reference, and what shared prompts save."""
        return "; ".join(filter(None, [describe(self), self.describe_reference(), self.sharing]))
