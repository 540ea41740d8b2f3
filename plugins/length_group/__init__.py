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

    padding: list[dict[int, tuple[int, int, int]]] = state([])
    """Step -> its tokens, and those with padding before and after, for each plan of steps."""

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

        steps = SortedSteps((yield), lengths, columns)
        self.padding.append(steps.padding)
        return steps

    @hookimpl
    def summary(self) -> str | None:
        """Report the share of the padding that was saved."""
        counts = [*zip(*(step for plan in self.padding for step in plan.values()), strict=True)]
        if not counts:
            return None
        tokens, before, after = map(sum, counts)
        if before == tokens:
            return "no padding to save"
        return (
            f"{(before - after) / (before - tokens):.0%} of the padding saved: "
            f"{1 - tokens / before:.0%} of all tokens before, {1 - tokens / after:.0%} now"
        )
