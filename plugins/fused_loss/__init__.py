"""Compute the loss from hidden states in chunks, without a micro-batch's whole logits."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any, Literal
from weakref import WeakKeyDictionary

from pydantic import Field

from plugsft import Batch, Recipe, RecipeError, hookimpl, plugin, state

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from plugsft.kit.tokens import Tokens


@plugin()
class FusedLoss:
    """Compute the loss from hidden states in chunks, without a micro-batch's whole logits.

    Only trained positions reach the head, and the gradient is computed on the way. What the model
    does to its logits behind the head (a soft cap, a scale) is measured, and done in the loss.
    At the start the loss is proved equal to the plain one on the run's own model.
    """

    kernel: Literal["auto", "torch", "cut_cross_entropy", "liger"] = "auto"
    """auto takes cut_cross_entropy where it is installed and there is a GPU, and else torch. It
    leaves out liger, which published figures have behind torch's matrix products."""
    chunk: Annotated[int, Field(ge=1)] | None = None
    """Positions at a time (of torch): as many as have 256 MiB of logits, 1 GiB on a GPU."""

    packed: bool = state(False)
    """Whether the model wants to hear where documents stand."""
    package: str = state("")
    """Whose kernel it is, if not ours."""
    chosen: str = state("torch kernel")
    """Which kernel it is, and why."""
    heads: WeakKeyDictionary[Any, Any] = state(WeakKeyDictionary())
    """What each living model does to the logits of its head; the run's own head comes first."""
    exact: bool = state(True)
    """Whether the head computes in float32: only inside it all that is wrapped around it shows."""
    proved: str = state("")
    trained: int = state(0)
    """Positions that reached the head, and all."""
    places: int = state(0)

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse a kernel that cannot run here, and what would be left unheard."""
        self.packed = recipe.has("bfd_packing")
        if self.kernel == "liger" and recipe.has("dpo"):
            raise RecipeError(
                'kernel = "liger" takes all positions alike, and [plugins.dpo] weighs each '
                'answer; set kernel = "auto"'
            )
        if self.kernel == "liger" and recipe.has("lora"):
            raise RecipeError(
                'kernel = "liger" is for full fine-tuning: it slows LoRA down; set kernel = "auto"'
            )
        name = "cut_cross_entropy" if self.kernel == "auto" else self.kernel
        if name == "torch":
            return
        from .loss import cannot_run

        why = cannot_run(name)
        if self.kernel == "auto" and (why or self.chunk):
            self.chosen = f"torch kernel ({why or 'chunk is set'})"
            return
        if why:
            raise RecipeError(f'kernel = "{name}" cannot run: {why}; or set kernel = "auto"')
        if self.chunk:
            raise RecipeError(f'chunk is for kernel = "torch", and {name} has its own parts')
        self.package, self.chosen = name, f"{name} kernel"

    @hookimpl(wrapper=True)
    def annotate(self, model: Module) -> Generator[None, Tokens, Tokens]:
        """Find the head and what is behind it, and prove the loss, on all ranks together."""
        from .loss import prove

        if not self.proved:
            training = model.training
            model.eval()
            try:
                prove(self, model)
            finally:
                model.train(training)
        return (yield)

    @hookimpl
    def score(self, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Let the head return losses in place of logits.

        The model is called as ever: all that wraps it does its work, and gathers the head's weight.
        What the head returns is zero and has the losses' gradients, so that neither a cap nor
        rounding behind the head changes either; the losses themselves go past them.
        """
        from .loss import score

        return score(self, model, batch, summed)

    @hookimpl
    def verdict(self) -> str:
        """Say how the loss is computed, and of how many positions."""
        said = [self.chosen, *map(str, [*self.heads.values()][:1]), self.proved]
        if self.places:
            said.append(f"{self.trained / self.places:.0%} of the positions reach the head")
        return "; ".join(filter(None, said))
