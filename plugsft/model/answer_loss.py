"""The base of losses over whole answers: DPO, KTO and reward models. The loop does not use it.

It imports torch in its hooks only, so that a recipe is read without it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from ..base.errors import RecipeError
from ..base.types import Batch, Ints, TokenNll
from ..hooks import Ranks, Run, RunModel, hookimpl
from ..recipe.tables import Recipe

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from ..tokens.store import Tokens


class AnswerLoss:
    """A loss over whole answers; a plugin inherits it, and gives `losses`.

    A step's loss is the mean over its examples, each times its weight, however long they are. The
    model's dropout is off, since answers are compared. A hook that a plugin has too calls the one
    here: `tokens = yield from super().add_columns(model, ranks)`.
    """

    recipe: Recipe
    model: RunModel
    ranks: Ranks

    def __post_init__(self) -> None:
        self.reference_model: Any = None
        """What answers are compared with, once it is loaded."""
        self.is_untrained = False
        """Whether the weights are those before step 1."""
        self._sums: dict[str, Tensor] = {}

    def losses(
        self, model: Module, batch: Batch, token_nll: TokenNll
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each example of a micro-batch, and metrics: a value for each.

        Metrics have the same names on all ranks.
        """
        raise NotImplementedError

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse prompts that would be compared."""
        self.recipe = recipe
        if any(recipe.data.of(each).train_on == "all" for each in recipe.data.all_sources()):
            raise RecipeError(
                'data.train_on = "all" has no effect: only answers are compared; remove it'
            )

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Remove the model's dropout."""
        from .answers import remove_dropout

        model = yield
        remove_dropout(model)
        return model

    @hookimpl(wrapper=True)
    def add_columns(self, model: RunModel, ranks: Ranks) -> Generator[None, Tokens, Tokens]:
        """Divide the loss by the number of examples, not of targets, and load the reference."""
        from .answers import Reference, count_examples

        self.model, self.ranks = model, ranks
        examples = count_examples((yield))
        wanted = self.recipe.provides("reference_model")
        if wanted and self.has_reference() and self.reference_model is None:
            stored = self.recipe.provides("stored_reference") is not None
            try:
                self.reference_model = Reference(model, wanted.value or "", stored)
            except RecipeError as error:
                raise error.of_model(wanted.key) from error
        return examples

    def has_reference(self) -> bool:
        """Tell whether a plugin that provides "reference_model" compares with one."""
        return True

    def score(self, model: Module, batch: Batch, token_nll: TokenNll) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each answer, and that less the reference's, if any."""
        from .answers import log_probs

        own = log_probs(model, batch, token_nll)
        if self.reference_model is None:
            return own, own
        return own, own - self.reference_model.log_probs(model, batch, token_nll)

    def describe_reference(self) -> str:
        """Name the reference once it is loaded."""
        return f"reference: {self.reference_model.name}" if self.reference_model else ""

    @hookimpl(wrapper=True)
    def collate(self, tokens: Tokens, examples: Ints) -> Generator[None, Batch, Batch]:
        """Add the targets of each answer, and the weight of each example."""
        from .answers import answer_columns

        batch = yield
        return batch | answer_columns(tokens, examples)

    @hookimpl
    def ready(self, run: Run) -> None:
        """Remember whether the model is still untrained."""
        self.is_untrained = run.step == 0

    def is_first(self, model: Module) -> bool:
        """Tell, once in a run, that the untrained model trains; then losses may be known.

        Not with dropout: it is that of adapters, which may not begin at 0.
        """
        from .answers import has_dropout

        first = self.is_untrained and model.training
        self.is_untrained = self.is_untrained and not first
        return first and not has_dropout(model)

    @hookimpl
    def step(self, model: Module, batch: Batch, denominator: float, token_nll: TokenNll) -> Tensor:
        """Sum the losses of examples, times their weights; add up their metrics likewise."""
        losses, metrics = self.losses(model, batch, token_nll)
        weights = batch["_weights"]
        for name, values in metrics.items():
            self._sums[name] = self._sums.get(name, 0) + (weights * values.detach()).sum()
        loss: Tensor = (weights * losses).sum()
        return loss / denominator

    @hookimpl
    def add_metrics(self) -> dict[str, Any]:
        """Return the sums of the metrics."""
        sums, self._sums = self._sums, {}
        return sums
