"""The model of packed rows: its attention, and the proof that documents stay apart."""

from torch.nn import Module
from transformers import PreTrainedModel

from ..base.errors import RecipeError
from ..batches.packed_rows import ATTENTION, attend_per_document
from ..recipe.capabilities import Capability
from ..recipe.tables import Recipe
from .document_probe import OWN_CODE, REFUSED, prove_on_model, prove_on_small_copy, unpack
from .load import Load
from .small_copy import Longest


class PackedModel:
    """Loads the model for packed rows, and proves that it computes their documents apart."""

    def __init__(self, packing: Capability, longest: Longest) -> None:
        self._packing, self._longest = packing, longest
        self.proof = ""
        """The results of both proofs in words."""

    def load(self, load: Load) -> PreTrainedModel:
        """Load it, with attention per document where no plugin has chosen a kernel."""
        load.kwargs.setdefault("attn_implementation", attend_per_document())
        try:
            model = load.build()
        except RecipeError as error:
            # A model without attention per document looks up the name in a table of its own.
            if repr(error.__cause__) != repr(KeyError(ATTENTION)):
                raise
            raise RecipeError(f"{REFUSED}: {OWN_CODE}; {unpack(self._packing)}") from error
        self.proof = prove_on_small_copy(model, self._longest, self._packing)
        return model

    def prove(self, model: Module, exact: bool) -> None:
        """Prove it on the run's model, on all ranks together."""
        self.proof = f"{prove_on_model(model, exact, self._packing)}, {self.proof}"


def packed_model(recipe: Recipe) -> PackedModel | None:
    """Return the model of packed rows, if a plugin packs rows."""
    packing = recipe.provides("packed_rows")
    if packing is None:
        return None
    row = recipe.packed_capacity()
    return PackedModel(packing, Longest(min(row, recipe.data.max_length), row))
