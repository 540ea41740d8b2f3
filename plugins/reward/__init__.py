"""Train a reward model, which scores answers (Bradley-Terry): affects results."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, FiniteFloat

from plugsft import (
    AnswerLoss,
    Batch,
    Data,
    Ints,
    ModelLoad,
    Ranks,
    Recipe,
    Rendered,
    Run,
    RunModel,
    TokenNll,
    hookimpl,
    plugin,
    state,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from plugsft.data_kit import Tokenizer, Tokens


@plugin(
    before=["lora"],
    provides={"preference_pairs": None, "reward_model": None, "weighted_examples": None},
    affects_results=["center"],
    affects_tokens=[],
    metrics=["accuracy", "margin", "mean_reward"],
)
class Reward(AnswerLoss):
    """Train a reward model, which scores answers (Bradley-Terry): affects results.

    A row has a prompt, a chosen and a rejected answer, and may have a `margin` between their
    scores. A new head of one output replaces that of the language model. It scores an answer at its
    last token. The run's `model/` is a sequence-classification model of transformers.
    """

    center: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Weight of an additional loss, (chosen + rejected)², which keeps the scores around 0."""

    seed: int = state(0)
    """Seed of the head's initial weights."""
    last_tokens: Any = state()
    """The last tokens of some answers."""
    padding: str = state("")
    """What the tokenizer lacks to score several answers at a time."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse samples of answers, and models that cannot become a reward model."""
        from .supported import ensure_scorable

        super().check(recipe)
        self.seed = recipe.train.seed
        ensure_scorable(recipe)

    @hookimpl
    def render(self, rows: list[dict[str, Any]], tokenizer: Tokenizer, data: Data) -> Rendered:
        """Render each row as two texts with the same prompt, and read its margin."""
        from .pairs import render_pairs_with_margins

        return render_pairs_with_margins(rows, tokenizer, data)

    @hookimpl(wrapper=True)
    def optimize_model(  # type: ignore[override]  # hooks get the arguments that they name
        self, load: ModelLoad
    ) -> Generator[None, Any, Any]:
        """Replace the language model's head, and turn off its dropout."""
        from .model import make_reward_model

        load.text_only = True  # a model that scores has no eyes
        model = yield from super().optimize_model()
        load.kept.tensors.clear()  # nor other heads
        return make_reward_model(model, self.seed)

    @hookimpl(wrapper=True)
    def add_columns(self, model: RunModel, ranks: Ranks) -> Generator[None, Tokens, Tokens]:
        """Remember how answers end."""
        from .pairs import last_tokens

        tokens = yield from super().add_columns(model, ranks)
        if self.last_tokens is None:
            self.last_tokens = last_tokens(tokens)
        return tokens

    @hookimpl
    def ready(self, run: Run) -> None:
        """Refuse a pad token that ends answers: transformers would score the token before it."""
        from .pairs import ensure_not_padding

        module: Any = getattr(run.model.module, "module", run.model.module)
        config = module.config.get_text_config()
        self.padding = ensure_not_padding(run.tokenizer, config, self.last_tokens)

    @hookimpl(wrapper=True)
    def collate(self, tokens: Tokens, examples: Ints) -> Generator[None, Batch, Batch]:
        """Add the place of each answer's last token, and the margins."""
        from .objective import pair_columns

        batch = yield from super().collate(tokens, examples)
        return batch | pair_columns(batch, tokens, examples)

    def losses(
        self, model: Module, batch: Batch, token_nll: TokenNll
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compare the scores of each pair."""
        from .objective import compare

        return compare(model, batch, self.center)

    @hookimpl
    def token_nll(self) -> Tensor:
        """Refuse a plugin that asks for probabilities of tokens."""
        from .supported import no_probabilities

        raise no_probabilities()

    @hookimpl
    def summary(self) -> str:
        """Report the loss, and a tokenizer without a pad token."""
        loss = "Bradley-Terry loss" + (f", center {self.center:g}" if self.center else "")
        return "; ".join(filter(None, [loss, self.padding]))
