"""The base of plugins that pack rows: it proves that the model computes their documents apart.

Like a plugin's class it imports torch in its hooks only, so that a recipe is read without it.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from plugsft import ModelLoad, Recipe, Run, RunModel, hookimpl, say

if TYPE_CHECKING:
    from plugsft.data_kit import Tokens


class Longest(NamedTuple):
    """The longest document and row of a run, in tokens."""

    document: int
    row: int


class Packer:
    """A plugin that packs rows; it inherits this, wraps `plan_batches` and answers `collate`.

    A hook that a plugin has too calls the one here: `yield from super().add_columns(model)`. The
    core refuses a run of packed rows without the proof.
    """

    packing: Any
    """The capability, which names the plugin's option."""
    longest: Longest
    compiled = False
    """Whether the model's layers are compiled."""
    limits_proof = proof = ""
    """The results in words: beyond the limits of attention; and of all proofs."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Read the capability and the longest row from the recipe."""
        self.packing, row = recipe.provides("packed_rows"), recipe.packed_capacity()
        self.longest = Longest(min(row, recipe.data.max_length), row)
        self.compiled = bool(recipe.provides("compiled_layers"))

    @hookimpl(wrapper=True)
    def optimize_model(self, load: ModelLoad) -> Generator[None, Any, Any]:
        """Load the model with attention per document, where no plugin has chosen a kernel.

        Its limits of attention are proved here, before it is sharded.
        """
        from .attention import attend_per_document
        from .proof import naming_own_attention, prove_on_layers

        load.kwargs.setdefault("attn_implementation", attend_per_document(self.compiled))
        with naming_own_attention(self.packing):
            model = yield
        prove = partial(prove_on_layers, longest=self.longest, packing=self.packing)
        self.limits_proof = prove(model)
        load.proofs.append(prove)
        return model

    @hookimpl(wrapper=True)
    def add_columns(self, model: RunModel) -> Generator[None, Tokens, Tokens]:
        """Prove it on the run's own model, on all ranks together.

        Here the model is sharded, and no plugin has computed with packed rows yet: those that score
        examples do it after their yields, and this runs before its own. A plugin that answers the
        hook replaces no wrapper of it.
        """
        from .proof import prove_on_model

        if self.limits_proof and not self.proof:  # evaluation data come after the training data
            result = prove_on_model(model.module, model.exact, self.packing)
            self.proof = f"{result}, {self.limits_proof}"
        return (yield)

    @hookimpl
    def ready(self, run: Run) -> None:
        """Report the proofs."""
        if self.proof:
            from .mixers import APART

            run.facts["packed_rows"] = self.proof
            kinds = {type(module) for module in run.module.modules()} & APART.keys()
            apart = ""
            if kinds:
                run.facts["computed_apart"] = names = sorted(kind.__name__ for kind in kinds)
                apart = f"; each is computed alone by {', '.join(names)}"
            say(f"packing checked: no document sees another{apart}")
