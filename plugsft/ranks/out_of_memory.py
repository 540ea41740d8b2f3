"""Out-of-memory errors that name the micro-batch and the settings that lower it."""

from collections.abc import Iterator, Sized
from contextlib import contextmanager

from ..base.errors import TrainError, out_of_memory
from ..base.types import Ints, Window
from ..recipe.tables import Recipe
from ..tokens.store import Tokens

SAVERS = {
    "gradient_checkpointing": "activations are computed again, not stored",
    "fused_loss": "whole logits are never stored",
    "lora": "few weights have gradients and optimizer states",
}
"""Bundled plugins that lower a step's memory, and how."""
SHARD = "more ranks with a sharded model (recipes/accelerate/fsdp2.yaml)"


@contextmanager
def fitting(
    recipe: Recipe, window: Window, rank: int, tokens: Tokens, done: Sized, doing: str = ""
) -> Iterator[None]:
    """Name the micro-batch in which memory ran out: the one after those that are done."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        where = f"{doing}step {window.step}, rank {rank}"
        what = _part(window.layout[rank], tokens, len(done))
        raise TrainError(f"{where}: out of memory in {what}. {_cures(recipe)}") from error


@contextmanager
def loading(recipe: Recipe, rank: int) -> Iterator[None]:
    """Report running out of memory while loading, with the cures."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        name = recipe.model.path or "[model.scratch]"
        cures = [SHARD]
        if not recipe.has("lora"):
            cures.append(f"[plugins.lora] ({SAVERS['lora']})")
        raise TrainError(
            f"model: out of memory while {name} was loaded on rank {rank}. It needs less with "
            f"{'; '.join(cures)}; `plugsft plan` says what each rank holds"
        ) from error


def _part(parts: list[Ints], tokens: Tokens, done: int) -> str:
    if done == len(parts):
        return "the optimizer's step"
    lengths = tokens.lengths[parts[done]]
    return (
        f"micro-batch {done + 1} of {len(parts)}: {len(lengths):,} examples, "
        f"{lengths.sum():,} tokens, the longest {lengths.max(initial=0):,}"
    )


def _cures(recipe: Recipe) -> str:
    packs = "plugins.bfd_packing.capacity" if recipe.has("bfd_packing") else "train.micro_batch"
    cures = [f"a smaller {packs}", f"a smaller data.max_length (now {recipe.data.max_length:,})"]
    cures += [f"[plugins.{name}] ({how})" for name, how in SAVERS.items() if not recipe.has(name)]
    cures.append(SHARD)
    return f"It needs less with {'; '.join(cures)}. None changes the batch size"
