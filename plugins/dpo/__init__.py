"""Learn which of two answers is preferred (DPO, SimPO, ORPO, ...): affects results."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from plugsft import (
    Batch,
    Data,
    Ints,
    Place,
    Recipe,
    Rendered,
    Run,
    RunModel,
    TokenNll,
    hookimpl,
    plugin,
    state,
)

from .losses import LOSSES, LossName, describe
from .options import ensure_options_work

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from plugsft.kit import Tokenizer, Tokens


@plugin(
    provides={
        "preference_pairs": None,
        "reference_model": "reference",
        "shared_prompts": "share_prompt",
        "weighted_examples": None,
    },
    affects_results=["loss", "beta", "gamma", "alpha", "label_smoothing", "nll", "reference"],
    affects_tokens=[],
)
class Dpo:
    """Learn which of two answers is preferred (DPO, SimPO, ORPO, ...): affects results.

    A row has a prompt, a chosen and a rejected answer; the loss of a step is the mean over its
    pairs, each times its weight. The reference is the model before training: with adapters the
    base, else a frozen copy. With [plugins.dpo_reference] its log-probabilities are computed once,
    and no copy is loaded. cpo, cpo_hinge, cpo_ipo, simpo and orpo have no reference.
    """

    loss: LossName = "sigmoid"
    """length_normalized, ipo, cpo_ipo, simpo and orpo compare log-probabilities per token, the
    others those of whole answers. docs/preferences.md has the formulas."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Factor of the compared log-probabilities; with ipo and cpo_ipo, 1 / (2 x the wanted margin);
    with orpo, the weight of the odds ratio. Default: 0.1; length_normalized: 5; simpo: 2."""
    gamma: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """The wanted margin of beta x log-probabilities, for simpo. Default: 1."""
    alpha: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Shape of the reward, for simpo: AlphaPO's (1 - p^-alpha) / alpha. Default: 0, log p."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """Assumed share of mislabelled pairs, for sigmoid, length_normalized, cpo and simpo.
    Default: 0."""
    nll: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Weight of an additional loss: the chosen answer's mean loss per token. Default: 0, with cpo,
    cpo_hinge, cpo_ipo and orpo 1."""
    reference: Place | None = None
    """Another reference: a folder or a name on the hub."""
    share_prompt: bool = False
    """Compute the prompt of a pair once, for both answers; for packed rows."""

    precomputed: bool = state(False)
    """Whether a plugin adds the reference's log-probabilities before step 1."""
    scorer: Any = state()
    """Names the reference, and computes log-probabilities of answers."""
    objective: Any = state()
    """Computes the losses of pairs, and sums their metrics."""
    sharing: str = state("")
    """What shared prompts save, once they are tested."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse options that would have no effect."""
        ensure_options_work(self, recipe)
        self.precomputed = recipe.provides("stored_reference") is not None

    @hookimpl
    def render(self, rows: list[dict[str, Any]], tokenizer: Tokenizer, data: Data) -> Rendered:
        """Render each row as two texts with the same prompt."""
        from plugsft.kit import render_pairs

        return render_pairs(rows, tokenizer, data)

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Remove the model's dropout: answers are compared, with each other and a reference."""
        from plugsft.kit import remove_dropout

        model = yield
        remove_dropout(model)
        return model

    @hookimpl(wrapper=True)
    def add_columns(self, model: RunModel) -> Generator[None, Tokens, Tokens]:
        """Divide the loss by the number of pairs, share prompts, and load the reference."""
        from .objective import Objective
        from .pairs import count_pairs
        from .scorer import Scorer
        from .shared_prompts import ensure_same_losses

        plain = yield
        tokens = count_pairs(plain, self.share_prompt)
        if self.share_prompt and not self.sharing:
            self.sharing = ensure_same_losses(model, plain, tokens)
        if self.scorer is None:
            reference = (self.reference or "") if LOSSES[self.loss].reference else None
            self.scorer = Scorer(model, reference, self.precomputed)
            self.objective = Objective(self, model.exact)
        return tokens

    @hookimpl(wrapper=True)
    def collate(self, tokens: Tokens, examples: Ints) -> Generator[None, Batch, Batch]:
        """Add the targets of each answer, and the reference's log-probabilities if known."""
        from .objective import pair_columns

        batch = yield
        return batch | pair_columns(tokens, examples)

    @hookimpl
    def ready(self, run: Run) -> None:
        """Check the first loss, unless the run resumes."""
        self.objective.is_untrained = run.step == 0

    @hookimpl
    def step(self, model: Module, batch: Batch, denominator: float, token_nll: TokenNll) -> Tensor:
        """Compare the answers of each pair, as the model and the reference score them."""
        pairs = self.scorer.score(model, batch, token_nll)
        loss: Tensor = self.objective.losses(pairs, model.training).sum()
        return loss / denominator

    @hookimpl
    def add_metrics(self) -> dict[str, Any]:
        """Return the sums of all metrics over pairs."""
        sums: dict[str, Any] = self.objective.take_sums()
        return sums

    @hookimpl
    def summary(self) -> str:
        """Report the loss, the reference, and what shared prompts save."""
        reference = f"reference: {self.scorer.name}" if self.scorer else ""
        return "; ".join(filter(None, [describe(self), reference, self.sharing]))
