"""Learn from answers that are labelled desirable or undesirable (KTO): affects results."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from plugsft import (
    AnswerLoss,
    Batch,
    Data,
    Ints,
    LoadedStep,
    Place,
    Recipe,
    RecipeError,
    TokenNll,
    hookimpl,
    plugin,
    state,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from plugsft.data_kit import Tokens

Weight = Annotated[FiniteFloat, Field(gt=0)]


def metrics_of(plugin: Kto, recipe: Recipe) -> list[str]:
    """Name the metrics of the plugin's loss, where there are answers of both labels."""
    names = ["margin"]
    for label in ("desirable", "undesirable"):
        names += [f"reward_{label}", f"logp_{label}"]
    return [*names, "kl"] if plugin.loss == "kto" else names


@plugin(
    conflicts={"dpo_reference": "KTO scores other texts in each epoch, so none can be stored"},
    provides={"labelled_answers": None, "reference_model": "reference", "weighted_examples": None},
    affects_results=["loss", "beta", "desirable_weight", "undesirable_weight", "reference"],
    affects_tokens=[],
    metrics=metrics_of,
)
class Kto(AnswerLoss):
    """Learn from answers that are labelled desirable or undesirable (KTO): affects results.

    A row has a prompt, an answer and a `label`, true or false. The loss of a step is the mean over
    its examples. The reference is the model before training: with adapters the base, else a frozen
    copy.
    """

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto compares each answer with the step's KL; apo_zero_unpaired with 0, which takes less time.
    docs/preferences.md has the formulas."""
    beta: Weight = 0.1
    """Factor of the compared log-probabilities; higher values stay nearer the reference."""
    desirable_weight: Weight = 1.0
    """Factor of the losses of desirable answers."""
    undesirable_weight: Weight = 1.0
    """Factor of the losses of undesirable answers."""
    reference: Place | None = None
    """Another reference: a folder or a name on the hub."""

    balance: str = state("")
    """The numbers of desirable and undesirable answers."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse steps without a KL."""
        super().check(recipe)
        if self.loss == "kto" and recipe.train.batch_size == 1:
            raise RecipeError(
                "train.batch_size = 1: the KL of a step needs answers of other examples; raise "
                'it, or set loss = "apo_zero_unpaired", which has no KL'
            )

    @hookimpl(wrapper=True)
    def cache(self) -> Generator[None, Any, Any]:
        """Count the labels of the training data, which comes first."""
        from .labels import describe_balance

        entry = yield
        self.balance = self.balance or describe_balance(self, entry)
        return entry

    @hookimpl(wrapper=True)
    def render(self, rows: list[dict[str, Any]], data: Data) -> Generator[None, Any, Any]:
        """Read the label of each row."""
        from .labels import read_labels

        rendered = yield
        return rendered and read_labels(rows, rendered, data)

    @hookimpl(wrapper=True)
    def collate(self, tokens: Tokens, examples: Ints) -> Generator[None, Batch, Batch]:
        """Add the label of each example, and the tokens of all."""
        from .objective import answer_columns

        batch = yield from super().collate(tokens, examples)
        return batch | answer_columns(tokens, examples)

    @hookimpl(wrapper=True)
    def load_batches(self) -> Generator[None, Iterator[LoadedStep], Iterator[LoadedStep]]:
        """Tell the micro-batches of a step which examples all ranks compute in it."""
        from .objective import name_examples

        return name_examples((yield))

    def losses(
        self, model: Module, batch: Batch, token_nll: TokenNll
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compare answers with the reference; a step's first micro-batch computes its KL."""
        from .objective import compare, ensure_unchanged

        # First, so that plugins which observe the model see this pass before the others.
        log_probs, gains = self.score(model, batch, token_nll)
        if self.is_first(model):
            ensure_unchanged(self, log_probs, gains)
        return compare(self, batch, log_probs, gains, model.training)

    @hookimpl
    def summary(self) -> str:
        """Report the loss, the reference, and the labels."""
        loss = f"{self.loss} loss, beta {self.beta:g}"
        return "; ".join(filter(None, [loss, self.describe_reference(), self.balance]))
