"""Pack examples into full micro-batches (best-fit decreasing); no attention across examples."""

from __future__ import annotations

from collections.abc import Generator
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from plugsft import (
    Batch,
    Ints,
    Layouts,
    ModelLoad,
    Recipe,
    RunModel,
    Train,
    hookimpl,
    plugin,
    state,
)

from .options import ensure_options_work
from .packer import Packer as Packer

if TYPE_CHECKING:
    from plugsft.data_kit import Tokens

COUNTING = Lock()
"""Training and evaluation batches may be collated in different threads."""
TYPICAL = 50_000.0
"""Length at which attention costs as much as the rest of a model with some billion weights."""


@plugin(provides={"packed_rows": "capacity"}, affects_results=["scope", "overlong"])
class BfdPacking(Packer):
    """Pack examples into full micro-batches (best-fit decreasing); no attention across examples.

    scope = "step" keeps the examples of each step, and does not affect results. scope = "dataset"
    does: it fills rows from the whole epoch, and a step trains `batch_size` packed rows.
    """

    capacity: Annotated[int, Field(ge=2)] | None = None
    """Most tokens in a micro-batch; raise it as memory allows. Default: data.max_length, and twice
    that for pairs."""
    scope: Literal["step", "dataset"] = "step"
    """Pack the examples of one step together, or of the whole epoch."""
    overlong: Literal["error", "truncate", "split"] = "error"
    """Treatment of examples with more tokens than `capacity`. "split" makes each part an example of
    its own, so steps have other examples. Parts without a trained token are left out."""

    max_tokens: int = state(0)
    """`capacity`, or its default."""
    break_even: float = state(TYPICAL)
    """Length at which attention costs as much as everything else."""
    cuts: list[Any] = state([])
    """Counts of overlong examples, in the training and the evaluation data."""
    sequences: int = state(1)
    """Most sequences in an example."""
    shape: Any = state(None)
    """The shape of all rows, if scope is "dataset"."""
    row_summary: str = state("")
    """Description of the rows, if scope is "dataset"."""
    tokens: int = state(0)
    """Tokens in all micro-batches so far."""
    micro_batches: int = state(0)

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Set the capacity; refuse settings that packing would ignore."""
        super().check(recipe)
        self.max_tokens = recipe.packed_capacity()
        self.sequences = 2 if recipe.provides("preference_pairs") else 1
        ensure_options_work(self, recipe)

    @hookimpl(wrapper=True)
    def optimize_model(self, load: ModelLoad) -> Generator[None, Any, Any]:
        """Measure the cost of the model's attention."""
        from .attention_cost import break_even_length

        model = yield from super().optimize_model(load)
        self.break_even = break_even_length(model)
        return model

    @hookimpl(wrapper=True)
    def add_columns(self, model: RunModel) -> Generator[None, Tokens, Tokens]:
        """Refuse, truncate or split overlong examples."""
        from .overlong import cut_overlong

        tokens = yield from super().add_columns(model)
        fitting, cuts = cut_overlong(tokens, self.max_tokens, self.overlong)
        self.cuts.append(cuts)
        return fitting

    @hookimpl(wrapper=True)
    def plan_batches(
        self, order: Ints, lengths: Ints, ranks: int, train: Train
    ) -> Generator[None, Layouts, Layouts]:
        """Pack the examples of each step, or of the whole epoch."""
        from .layouts import PackedEpoch, PackedSteps
        from .overlong import limit_lengths

        layouts = yield
        # `add_columns` cuts examples before a run, but `plugsft check` plans without it.
        lengths = limit_lengths(lengths, self.max_tokens, self.overlong)
        if self.scope == "step":
            return PackedSteps(layouts, lengths, ranks, self.max_tokens, self.cost)
        rows = PackedEpoch(order, lengths, ranks, train.batch_size, self.max_tokens, self.cost)
        shape = rows.shape(self.sequences)
        self.shape = self.shape.join(shape) if self.shape else shape
        # The training data comes before the evaluation data.
        self.row_summary = self.row_summary or rows.describe()
        return rows

    @hookimpl
    def collate(self, tokens: Tokens, examples: Ints) -> Batch:
        """Pack examples into one row; with scope = "dataset", pad it to the capacity."""
        from .documents import pack

        num_tokens = int(tokens.lengths[examples].sum())
        with COUNTING:
            self.tokens += num_tokens
            self.micro_batches += len(examples) > 0
        if self.scope == "step":
            return pack(tokens, examples)
        from .row_shape import fix_shape

        batch = pack(tokens, examples, self.max_tokens)
        return fix_shape(batch, num_tokens, self.shape) if self.shape else batch

    @hookimpl
    def summary(self) -> str:
        """Describe the packing."""
        from .overlong import describe_cuts

        unit = "step" if self.scope == "step" else "data set"
        lines = [f"each {unit} packed into micro-batches of at most {self.max_tokens:,} tokens"]
        if self.micro_batches:
            fill = self.tokens / self.micro_batches / self.max_tokens
            lines.append(f"{fill:.0%} full on average")
        cuts = describe_cuts(self.cuts, self.overlong)
        return "; ".join(filter(None, [*lines, self.row_summary, cuts]))

    def cost(self, lengths: Ints) -> Any:
        """Return the cost of documents, as a number of tokens without attention."""
        return lengths * (1 + lengths / self.break_even)
