"""Out-of-memory errors that name the micro-batch and the settings that lower memory."""

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager

from ..base.errors import TrainError, out_of_memory
from ..recipe.capabilities import Capability
from ..recipe.tables import Recipe
from .load_batches import GlobalBatch

SAVERS = {
    "recomputed_activations": "activations are computed again, not stored",
    "fused_head": "whole logits are never stored",
    "adapters": "few weights have gradients and optimizer states",
}
"""Capabilities that lower a step's memory, and how."""
SHARD = "more ranks with a sharded model (recipes/accelerate/fsdp2.yaml)"


@contextmanager
def explain_out_of_memory(
    recipe: Recipe, batch: GlobalBatch, losses: Sized, phase: str = ""
) -> Iterator[None]:
    """Name the micro-batch that ran out of memory: the first without a loss."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        where = f"{phase}step {batch.step}, rank {batch.rank}"
        what = _describe_micro_batch(batch, len(losses))
        raise TrainError(f"{where}: out of memory in {what}. {_cures(recipe)}") from error


@contextmanager
def explain_out_of_memory_in_loading(recipe: Recipe, rank: int) -> Iterator[None]:
    """Name the model that ran out of memory while loading, with the cures."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        name = recipe.model.path or "[model.scratch]"
        cures = [SHARD, *_missing(recipe, ["adapters"])]
        raise TrainError(
            f"model: out of memory while {name} was loaded on rank {rank}. It needs less with "
            f"{'; '.join(cures)}; `plugsft plan` says what each rank holds"
        ) from error


def _describe_micro_batch(batch: GlobalBatch, index: int) -> str:
    micro_batches = batch.plan.layout[batch.rank]
    if index == len(micro_batches):
        return "the optimizer's step"
    lengths = batch.tokens.lengths[micro_batches[index]]
    return (
        f"micro-batch {index + 1} of {len(micro_batches)}: {len(lengths):,} examples, "
        f"{lengths.sum():,} tokens, the longest {lengths.max(initial=0):,}"
    )


def _cures(recipe: Recipe) -> str:
    size, _ = recipe.micro_batch_size()
    cures = [f"a smaller {size}", f"a smaller data.max_length (now {recipe.data.max_length:,})"]
    cures += [*_missing(recipe, SAVERS), SHARD]
    return f"It needs less with {'; '.join(cures)}. None changes the batch size"


def _missing(recipe: Recipe, savers: Iterable[str]) -> list[str]:
    """Return the plugins to add for capabilities that the recipe lacks."""
    return [
        f"{Capability.bundled(name).table} ({SAVERS[name]})"
        for name in savers
        if not recipe.provides(name)
    ]
