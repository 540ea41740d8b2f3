"""The micro-batches of a recipe's epoch, and the largest of them.

Prepared tokens give every length; otherwise the first rows of each source represent the others.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...base.errors import DataError
from ...base.types import Batch, Ints, Slice
from ...batches.estimate import EstimatedColumns
from ...batches.plan import shuffle
from ...data.prepare import open_data, open_named_tokens
from ...data.sample import make_work
from ...data.sources import ensure_columns, open_source
from ...recipe.tables import Recipe
from ...registry.active import Active
from ...tokens.shards import write_index
from ...tokens.store import Tokens

SAMPLE = 100
"""Rows of each source that are rendered and encoded."""
STEPS, RANK_STEPS = 64, 2**15
"""Most steps of an epoch that are laid out, and most steps times ranks."""


@dataclass(frozen=True)
class Epoch:
    """The examples of an epoch; a sample may represent all of them."""

    tokens: Tokens
    examples: Ints
    """[example of the epoch]: its number in `tokens`."""
    order: Ints
    vocabulary: int
    """Entries of the tokenizer."""
    is_complete: bool
    """Whether all lengths are known."""


@dataclass(frozen=True)
class Workload:
    """The steps of an epoch, as the ranks see them."""

    batch: Batch
    """The largest micro-batch."""
    micro_batches: int
    """Micro-batches of a rank in a step, at most."""
    tokens: float
    """Mean of a step, without padding."""
    idle_ranks: int
    """Ranks that never get an example."""


def read_epoch(recipe: Recipe, active: Active, folder: Path) -> Epoch:
    """Return an epoch's examples: from prepared tokens, or from a sample of each source."""
    if recipe.data.tokens:
        data = open_data(recipe, active)
        tokens = open_named_tokens(recipe, data, active)
        order = active.hooks.order_examples(tokens=tokens, epoch=0, seed=recipe.train.seed)
        return epoch_of(recipe, tokens, order, len(data.tokenizer))
    sources = recipe.data.all_sources()
    opened = [open_source(source) for source in sources]
    ensure_columns(recipe.data, opened)
    work = make_work(recipe, active, opened, folder, SAMPLE)
    work.folder = folder / "sample"
    work.folder.mkdir()
    counts = [min(SAMPLE, len(rows)) for rows in opened]
    shards = [
        work(Slice(number, 0, count, rows.part(0, count)))
        for number, (rows, count) in enumerate(zip(opened, counts, strict=True))
    ]
    if not any(shard.examples for shard in shards):
        raise DataError(
            f"data: none of the first {sum(counts):,} rows can be used; plugsft check names the "
            "reasons"
        )
    facts = [
        {"name": source.source, "weight": source.weight, "examples": shard.examples}
        for shard, source in zip(shards, sources, strict=True)
    ]
    write_index(work.folder, shards, {"key": "", "sources": facts})
    tokens, examples, first = Tokens(work.folder), list[Ints](), 0
    for shard, rows, source, count in zip(shards, opened, sources, counts, strict=True):
        per_row = shard.examples / max(1, count)
        total = round(source.weight * len(rows) * per_row)
        examples.append(first + np.resize(np.arange(shard.examples), total))
        first += shard.examples
    numbers = np.concatenate(examples)
    order = shuffle([(len(numbers), 1.0)], recipe.train.seed, 0)
    return Epoch(_share_prompts(recipe, tokens), numbers, order, len(work.tokenizer), False)


def epoch_of(recipe: Recipe, tokens: Tokens, order: Ints, vocabulary: int) -> Epoch:
    """Return an epoch of prepared tokens in an order."""
    return Epoch(_share_prompts(recipe, tokens), np.arange(len(tokens)), order, vocabulary, True)


def _share_prompts(recipe: Recipe, tokens: Tokens) -> Tokens:
    """Share prompts, as plugins do before the first step."""
    return tokens.share_prompts() if recipe.provides("shared_prompts") else tokens


def workload_of(recipe: Recipe, active: Active, epoch: Epoch, ranks: int) -> Workload:
    """Lay out steps of an epoch; find the largest micro-batch."""
    lengths = epoch.tokens.lengths[epoch.examples]
    columns = {name: of[epoch.examples] for name, of in epoch.tokens.plan_columns().items()}
    layouts = active.hooks.plan_batches(
        order=epoch.order,
        lengths=lengths,
        columns=EstimatedColumns(lengths, columns),
        ranks=ranks,
        train=recipe.train,
    )
    packed = recipe.provides("packed_rows") is not None
    all_tokens = _cut(recipe, epoch.tokens) if packed else epoch.tokens
    lengths = all_tokens.lengths[epoch.examples]
    count = max(2, min(STEPS, RANK_STEPS // ranks))
    steps = np.unique(np.linspace(0, len(layouts) - 1, count).astype(np.int64)).tolist()
    busy, micro_batches, tokens = np.zeros(ranks, np.bool_), 0, 0
    sized: list[tuple[tuple[int, int], Ints]] = []
    for step in steps:
        for rank, parts in enumerate(layouts[step]):
            micro_batches = max(micro_batches, len(parts))
            for part in parts:
                documents = lengths[part]
                busy[rank] |= len(documents) > 0
                tokens += int(documents.sum())
                sized.append((_size(documents, packed), epoch.examples[part]))
    batch = _largest(active, all_tokens, sized)
    return Workload(batch, micro_batches, tokens / len(steps), ranks - int(busy.sum()))


def _cut(recipe: Recipe, tokens: Tokens) -> Tokens:
    """Cut examples that a packed row cannot hold, as its plugin does before the first step."""
    size = recipe.packed_capacity()
    if not (tokens.lengths > size).any():
        return tokens
    numbers = np.arange(len(tokens))
    return tokens.cut(numbers, 0 * numbers, np.minimum(tokens.lengths, size))


def _size(lengths: Ints, packed: bool) -> tuple[int, int]:
    """Return a micro-batch's tokens with padding, and the pairs that attention compares."""
    if packed:
        return int(lengths.sum()), int((lengths**2).sum())
    longest = int(lengths.max(initial=0))
    return len(lengths) * longest, len(lengths) * longest**2


def _largest(active: Active, tokens: Tokens, sized: list[tuple[tuple[int, int], Ints]]) -> Batch:
    """Return the largest micro-batch: the one with most tokens, then most attention.

    A plugin may pad all rows to one length, so the batches are compared.
    """
    most_attention = max(sized, key=lambda part: part[0][::-1])
    most_tokens = max(sized, key=lambda part: part[0])
    batches = [
        active.hooks.collate(tokens=tokens, examples=part, pad=0)
        for _, part in (most_attention, most_tokens)
    ]
    return max(batches, key=lambda batch: batch["input_ids"].numel())
