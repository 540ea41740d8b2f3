"""Sort the examples inside each step by length, so that micro-batches pad less."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from plugsft import Ints, Layouts, Recipe, RecipeError, hookimpl, plugin, state

if TYPE_CHECKING:
    from plugsft.kit import Tokens


@plugin(
    conflicts={"bfd_packing": "packed micro-batches hold no padding to save"},
    provides={"sorted_lengths": None},
)
class LengthGroup:
    """Sort the examples inside each step by length, so that micro-batches pad less."""

    tokens: int = state(0)
    """Tokens without padding."""
    before: int = state(0)
    """Tokens with padding, in the original micro-batches."""
    after: int = state(0)
    """Tokens with padding, in the sorted micro-batches."""
    seen: list[Any] = state([])
    """The training data and the evaluation data."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe without padding."""
        if recipe.train.micro_batch == 1:
            raise RecipeError(
                "train.micro_batch = 1 pads nothing, so there is nothing to save; raise it as far "
                "as memory allows, or remove [plugins.length_group]"
            )

    @hookimpl(wrapper=True)
    def add_columns(self) -> Generator[None, Tokens, Tokens]:
        """Keep the tokens: each answer of a pair is padded as its own row."""
        tokens = yield
        self.seen.append(tokens)
        return tokens

    @hookimpl(wrapper=True)
    def plan_batches(self, lengths: Ints) -> Generator[None, Layouts, Layouts]:
        """Sort the examples of each step, longest first."""
        from .sorted_steps import SortedSteps, shapes_of

        layouts = yield
        tokens = next((tokens for tokens in self.seen if tokens.lengths is lengths), None)
        return SortedSteps(layouts, lengths, self, *(shapes_of(tokens) if tokens else ()))

    @hookimpl
    def summary(self) -> str | None:
        """Report the share of the padding that was saved."""
        if not self.tokens:
            return None
        padding = self.before - self.tokens
        if not padding:
            return "no padding to save"
        return (
            f"{(self.before - self.after) / padding:.0%} of the padding saved: "
            f"{padding / self.before:.0%} of all tokens before, "
            f"{(self.after - self.tokens) / self.after:.0%} now"
        )
