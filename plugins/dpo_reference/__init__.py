"""Compute the reference's log-probabilities once, before step 1, and store them."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt

from plugsft import Ranks, Recipe, RunModel, hookimpl, plugin, state

if TYPE_CHECKING:
    from plugsft.data_kit import Tokens

    from .log_probs import LogProbs
    from .reference_pass import ReferencePass


@plugin(
    after=["dpo", "bfd_packing", "fused_loss", "lora"],
    requires=["dpo"],
    provides={"stored_reference": None},
)
class DpoReference:
    """Compute the reference's log-probabilities once, before step 1, and store them.

    With [plugins.arrow_cache] every run finds them, otherwise only runs with the same output. All
    ranks compute pairs sorted by length, without gradients, packed if the run packs. Other tokens,
    weights, dtypes or attention kernels need a new pass; it copies pairs that an earlier pass of
    the same reference has computed. A killed run continues after its last stored block.
    """

    capacity: Annotated[int, Field(ge=2)] | None = None
    """Most tokens in a micro-batch of this pass. Default: as in training."""
    probes: NonNegativeInt = 4
    """Random pairs that are recomputed at the start of each run, and compared."""

    reference: str = state("")
    """Path or name of the reference, if it is not the model before training."""
    packed: bool = state(False)
    max_tokens: int = state(0)
    """Most tokens in a micro-batch, padding included."""
    epochs: int = state(1)
    results: list[str] = state([])

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Read the reference and the size of micro-batches from the recipe."""
        reference = recipe.provides("reference_model")
        self.reference = (reference and reference.value) or ""
        self.packed = recipe.provides("packed_rows") is not None
        row = recipe.packed_capacity() * (1 if self.packed else recipe.train.micro_batch)
        self.max_tokens = self.capacity or row
        self.epochs = recipe.train.epochs

    @hookimpl(wrapper=True)
    def add_columns(self, model: RunModel, ranks: Ranks) -> Generator[None, Tokens, Tokens]:
        """Load the log-probabilities or compute them; recompute some as a check."""
        from plugsft.kit import artefact

        from .log_probs import LogProbs
        from .reference_pass import ReferencePass

        tokens = yield
        reference_pass = ReferencePass(self, model, tokens, ranks)
        log_probs = artefact(ranks, reference_pass.key, reference_pass.build, LogProbs)
        reference_pass.recheck(log_probs)
        tokens.columns = {**tokens.columns, "reference": log_probs.values}
        self.results.append(self.describe(reference_pass, log_probs))
        return tokens

    @hookimpl
    def summary(self) -> str | None:
        """Report what the pass took, and what it saves."""
        return "; ".join(self.results) or None

    def describe(self, done: ReferencePass, log_probs: LogProbs) -> str:
        """Report the cost of a data set's pass, what it saves, and its folder."""
        pairs = len(done.tokens)
        cost = f"{pairs:,} pairs known"
        if done.computed:
            cost = f"{done.computed:,} of {pairs:,} pairs computed in {done.seconds:.1f} s"
        if self.probes:
            cost += f", {self.probes} of them recomputed as a check ({done.difference:.0e} off)"
        # Without this plugin, training would compute them in each epoch.
        seconds = log_probs.facts["seconds_per_pair"] * pairs * self.epochs - done.seconds
        savings = [f"{seconds:.1f} s of reference passes"] if seconds > 0.05 else []
        gib = round(done.saved_bytes / 2**30, 2)
        savings += [f"{gib} GiB on each rank"] if gib else []
        saved = " and ".join(savings) or "nothing"
        return f"{cost}; saves {saved} in this run; stored in {log_probs.folder}"
