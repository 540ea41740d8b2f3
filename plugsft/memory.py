"""Out of memory, said so that a person knows what was too much and what would lower it."""

from collections.abc import Iterator, Sized
from contextlib import contextmanager

import torch

from .errors import TrainError
from .recipe import Recipe
from .tokens import Tokens
from .types import Window

SAVERS = {
    "gradient_checkpointing": "activations are computed again, not kept",
    "fused_loss": "no logits are held",
    "lora": "few weights have gradients and optimizer states",
}
"""Bundled plugins that lower a step's memory, and how."""


@contextmanager
def fitting(
    recipe: Recipe, window: Window, rank: int, tokens: Tokens, done: Sized
) -> Iterator[None]:
    """Name the micro-batch in which memory ran out: the one after those that are done."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise TrainError(_told(recipe, window, rank, tokens, len(done))) from error


def _told(recipe: Recipe, window: Window, rank: int, tokens: Tokens, done: int) -> str:
    parts = window.layout[rank]
    where = f"step {window.step}, rank {rank}: out of memory in the optimizer's step"
    if done < len(parts):
        lengths = tokens.lengths[parts[done]]
        where = (
            f"step {window.step}, rank {rank}: out of memory in micro-batch {done + 1} of "
            f"{len(parts)}: {len(lengths):,} examples, {lengths.sum():,} tokens, the longest "
            f"{lengths.max(initial=0):,}"
        )
    packs = "plugins.bfd_packing.capacity" if recipe.has("bfd_packing") else "train.micro_batch"
    cures = [f"a smaller {packs}", f"a smaller data.max_length (now {recipe.data.max_length:,})"]
    cures += [f"[plugins.{name}] ({how})" for name, how in SAVERS.items() if not recipe.has(name)]
    cures.append("more ranks that share the model (recipes/accelerate/fsdp2.yaml)")
    return f"{where}. It needs less with {'; '.join(cures)}. None changes the batch size"
