"""Sort the examples inside each step by length, so that micro-batches pad less."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from plugsft import Ints, Layouts, Recipe, RecipeError, hookimpl, plugin, state


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

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe without padding."""
        if recipe.train.micro_batch == 1:
            raise RecipeError(
                "train.micro_batch = 1 pads nothing, so there is nothing to save; raise it as far "
                "as memory allows, or remove [plugins.length_group]"
            )

    @hookimpl(wrapper=True)
    def plan_batches(
        self, lengths: Ints, columns: Mapping[str, Ints]
    ) -> Generator[None, Layouts, Layouts]:
        """Sort the examples of each step, longest first."""
        from .sorted_steps import SortedSteps

        layouts = yield
        return SortedSteps(layouts, lengths, columns, self)

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
