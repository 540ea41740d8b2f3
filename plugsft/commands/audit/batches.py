"""Whether batches make sense: how much a step holds, how full it is, and the known mistakes."""

from ...base.types import Ints, Layouts
from ...recipe.tables import Recipe

SEEN = 8
"""Steps of an epoch that are looked at."""
FULL = 0.5
"""Share of tokens that are not padding below which a warning is printed."""
COLLAPSED = 4
"""How many times fewer steps a packed epoch may have without a warning."""


def sense(recipe: Recipe, layouts: Layouts, lengths: Ints) -> tuple[str, list[str]]:
    """Describe the size of a step; warn of likely mistakes."""
    windows = layouts[:SEEN]
    parts = [lengths[part] for window in windows for rank in window for part in rank if len(part)]
    tokens = sum(int(part.sum()) for part in parts)
    micro = sum(len(window[0]) for window in windows) / len(windows)
    said = f"about {tokens / len(windows):,.0f} tokens a step, in {micro:,.1f} micro-steps"
    each = f"{tokens / len(parts):,.0f} tokens in a micro-batch"
    if packing := recipe.plugins.get("bfd_packing"):
        whole = packing["scope"] == "step"
        more = ", none of them padding" if whole else ""
        return f"{said}; {each}{more}", collapsed(recipe, layouts, len(lengths))
    if recipe.has("dpo"):  # only the sum of a pair's lengths is known here
        return f"{said}; {each}", []
    fill = tokens / sum(len(part) * int(part.max()) for part in parts)
    warnings = []
    if fill < FULL:
        warnings.append(
            f"{1 - fill:.0%} of all tokens would be padding; add [plugins.bfd_packing], "
            "which needs none, or [plugins.length_group], or lower train.micro_batch"
        )
    return f"{said}; {each}, padding {1 - fill:.0%}", warnings


def collapsed(recipe: Recipe, layouts: Layouts, examples: int) -> list[str]:
    """Warn where packing over the whole epoch leaves few steps."""
    size = recipe.train.batch_size
    if len(layouts) * COLLAPSED * size > examples:
        return []
    return [
        f"an epoch has {len(layouts):,} steps, and {-(-examples // size):,} unpacked: a step is "
        f"{size} packed rows, {examples / len(layouts):,.0f} examples. Lower train.batch_size to "
        f"about {max(1, size * size * len(layouts) // examples)} to take as many steps as before"
    ]
