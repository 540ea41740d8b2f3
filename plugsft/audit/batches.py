"""The size and padding of batches, and likely mistakes in them."""

from ..base.console import format_count
from ..base.types import Ints, Layouts
from ..recipe.capabilities import Capability
from ..recipe.tables import Recipe

STEPS = 8
"""Steps of an epoch that are examined."""
MAX_PADDING = 0.5
"""Share of padding above which a warning is printed."""
MAX_FEWER = 4
"""Factor by which packing may lower the number of steps without a warning."""


def describe_batches(recipe: Recipe, layouts: Layouts, lengths: Ints) -> tuple[str, list[str]]:
    """Describe the size of a step; warn of likely mistakes."""
    steps = layouts[:STEPS]
    micro_batches = [lengths[part] for step in steps for rank in step for part in rank if len(part)]
    tokens = sum(int(batch.sum()) for batch in micro_batches)
    per_rank = sum(len(step[0]) for step in steps) / len(steps)
    text = (
        f"about {tokens / len(steps):,.0f} tokens a step, in {per_rank:,.1f} micro-batches a rank"
    )
    text += f"; {tokens / len(micro_batches):,.0f} tokens in a micro-batch"
    if recipe.provides("packed_rows"):
        key, capacity = recipe.micro_batch_size()
        text += f", at most {capacity:,} ({key})"
        return text, warn_of_few_steps(recipe, layouts, len(lengths))
    if recipe.provides("preference_pairs"):  # only the sum of a pair's lengths is known here
        return text, []
    padding = 1 - tokens / sum(len(batch) * int(batch.max()) for batch in micro_batches)
    warnings = []
    if padding > MAX_PADDING:
        warnings.append(
            f"{padding:.0%} of all tokens would be padding; "
            f"add {Capability.bundled('packed_rows').table}, which needs none, or "
            f"{Capability.bundled('sorted_lengths').table}, or lower train.micro_batch"
        )
    return f"{text}, padding {padding:.0%}", warnings


def warn_of_few_steps(recipe: Recipe, layouts: Layouts, examples: int) -> list[str]:
    """Warn if packing over the whole epoch leaves few steps."""
    size = recipe.train.batch_size
    if len(layouts) * MAX_FEWER * size > examples:
        return []
    return [
        f"an epoch has {format_count(len(layouts), 'step')}, and {-(-examples // size):,} "
        f"unpacked: a step is {size} packed rows, {examples / len(layouts):,.0f} examples. "
        f"Lower train.batch_size to about {max(1, size * size * len(layouts) // examples)} "
        "to take as many steps as before"
    ]
