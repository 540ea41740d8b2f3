"""The micro-batches of a recipe's epoch, and the largest of them.

Prepared tokens give every length; otherwise the first rows of each source represent the others.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...base.types import Batch, Ints, Slice
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
        return epoch_of(recipe, tokens, len(data.tokenizer))
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
    return Epoch(_fit(recipe, tokens), numbers, order, len(work.tokenizer), False)


def epoch_of(recipe: Recipe, tokens: Tokens, vocabulary: int) -> Epoch:
    """Return the first epoch of prepared tokens."""
    counts = [(source["examples"], source["weight"]) for source in tokens.facts["sources"]]
    order = shuffle(counts, recipe.train.seed, 0)
    return Epoch(_fit(recipe, tokens), np.arange(len(tokens)), order, vocabulary, True)


def _fit(recipe: Recipe, tokens: Tokens) -> Tokens:
    """Share prompts and cut long examples, as plugins do before the first step."""
    if recipe.plugins.get("dpo", {}).get("share_prompt"):
        return tokens.share_prompts()
    packing = recipe.plugins.get("bfd_packing", {})
    size = packing.get("capacity") or int(tokens.lengths.max())
    if packing.get("overlong", "error") == "error" or not (tokens.lengths > size).any():
        return tokens
    numbers = np.arange(len(tokens))
    return tokens.cut(numbers, 0 * numbers, np.minimum(tokens.lengths, size))


def workload_of(recipe: Recipe, active: Active, epoch: Epoch, ranks: int) -> Workload:
    """Lay out steps of an epoch; find the largest micro-batch."""
    lengths = epoch.tokens.lengths[epoch.examples]
    layouts = active.hooks.plan_batches(
        order=epoch.order, lengths=lengths, ranks=ranks, train=recipe.train
    )
    packed = recipe.has("bfd_packing")
    full_rows = recipe.plugins.get("bfd_packing", {}).get("scope") == "dataset"
    row_size = recipe.packed_capacity() if full_rows else 0
    count = max(2, min(STEPS, RANK_STEPS // ranks))
    steps = np.unique(np.linspace(0, len(layouts) - 1, count).astype(np.int64)).tolist()
    busy, micro_batches, tokens = np.zeros(ranks, np.bool_), 0, 0
    largest, size = np.zeros(0, np.int64), (0, 0)
    for step in steps:
        for rank, parts in enumerate(layouts[step]):
            micro_batches = max(micro_batches, len(parts))
            for part in parts:
                documents = lengths[part]
                busy[rank] |= len(documents) > 0
                tokens += int(documents.sum())
                part_size = _size(documents, packed, row_size)
                if part_size > size:
                    size, largest = part_size, part
    batch = active.hooks.collate(tokens=epoch.tokens, examples=epoch.examples[largest], pad=0)
    return Workload(batch, micro_batches, tokens / len(steps), ranks - int(busy.sum()))


def _size(lengths: Ints, packed: bool, row_size: int) -> tuple[int, int]:
    """Return a micro-batch's tokens with padding, and the pairs that attention compares."""
    if packed:
        return max(row_size, int(lengths.sum())), int((lengths**2).sum())
    longest = int(lengths.max(initial=0))
    return len(lengths) * longest, len(lengths) * longest**2
