"""Learn from answers that are labelled desirable or undesirable (KTO): affects results."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from plugsft import (
    Batch,
    Data,
    Ints,
    LoadedStep,
    Place,
    Ranks,
    Recipe,
    Run,
    RunModel,
    TokenNll,
    hookimpl,
    plugin,
    state,
)

from .options import ensure_options_work

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from plugsft.kit import Tokens

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@plugin(
    conflicts={"dpo_reference": "KTO scores other texts in each epoch, so none can be stored"},
    provides={"labelled_answers": None, "reference_model": "reference", "weighted_examples": None},
    affects_results=["loss", "beta", "desirable_weight", "undesirable_weight", "reference"],
    affects_tokens=[],
)
class Kto:
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

    recipe: Any = state()
    balance: str = state("")
    """The numbers of desirable and undesirable answers."""
    objective: Any = state()
    """Computes the losses of examples, and sums their metrics."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse options that would have no effect."""
        ensure_options_work(self, recipe)
        self.recipe = recipe

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
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Remove the model's dropout: answers are compared with a reference."""
        from plugsft.kit import remove_dropout

        model = yield
        remove_dropout(model)
        return model

    @hookimpl(wrapper=True)
    def add_columns(self, model: RunModel, ranks: Ranks) -> Generator[None, Tokens, Tokens]:
        """Divide the loss by the number of examples, and load the reference."""
        from .labels import count_examples
        from .objective import Objective

        tokens = count_examples((yield))
        if self.objective is None:
            self.objective = Objective(self, model, ranks)
        return tokens

    @hookimpl(wrapper=True)
    def collate(self, tokens: Tokens, examples: Ints) -> Generator[None, Batch, Batch]:
        """Add the label, the weight and the number of targets of each example."""
        from .objective import answer_columns

        batch = yield
        return batch | answer_columns(tokens, examples)

    @hookimpl(wrapper=True)
    def load_batches(self) -> Generator[None, Iterator[LoadedStep], Iterator[LoadedStep]]:
        """Tell the micro-batches of a step which examples all ranks compute in it."""
        from .steps import name_examples

        return name_examples((yield))

    @hookimpl
    def ready(self, run: Run) -> None:
        """Check the first log-probabilities, unless the run resumes."""
        self.objective.is_untrained = run.step == 0

    @hookimpl
    def step(self, model: Module, batch: Batch, denominator: float, token_nll: TokenNll) -> Tensor:
        """Compare answers with the reference; a step's first micro-batch computes its KL."""
        losses: Tensor = self.objective.losses(model, batch, token_nll)
        return losses.sum() / denominator

    @hookimpl
    def add_metrics(self) -> dict[str, Any]:
        """Return the sums of all metrics over examples."""
        sums: dict[str, Any] = self.objective.take_sums()
        return sums

    @hookimpl
    def summary(self) -> str:
        """Report the loss, the reference, and the labels."""
        reference = f"reference: {self.objective.reference.name}" if self.objective else ""
        loss = f"{self.loss} loss, beta {self.beta:g}"
        return "; ".join(filter(None, [loss, reference, self.balance]))
