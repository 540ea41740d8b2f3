"""What a step asks of each rank: micro-batches as they will be laid out, and the largest of them.

Of tokens that are prepared, every length is known; else the first rows of each source stand for
the others.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...base.types import Batch, Ints, Slice
from ...batches.plan import shuffled
from ...data.prepare import job_of, named
from ...data.sample import worker
from ...data.sources import ensure_columns, open_source
from ...output.bottlenecks import capacity
from ...recipe.tables import Recipe
from ...registry.active import Active
from ...tokens.shards import write_index
from ...tokens.store import Tokens

ROWS = 100
"""Of each source, so many are rendered and encoded."""
SEEN, SHARES = 64, 2**15
"""Steps of an epoch that are laid out, and shares of ranks in them, at most."""


@dataclass(frozen=True)
class Rows:
    """The examples of an epoch, some of which stand for others."""

    tokens: Tokens
    numbers: Ints
    """Of each example, the one that stands for it."""
    order: Ints
    vocabulary: int
    """Entries of the tokenizer."""
    known: bool
    """Whether each stands for itself."""


@dataclass(frozen=True)
class Workload:
    """What the steps of an epoch ask of the ranks."""

    batch: Batch
    """The largest micro-batch."""
    micro: int
    """Micro-batches of a rank in a step, at most."""
    slots: Ints
    """[step, rank]: places that are computed."""
    squares: Ints
    """[step, rank]: of each document the square of its length, which attention costs."""
    parts: Ints
    """[step]: micro-batches of each rank."""
    tokens: float
    """Of a step, without padding."""
    idle: int
    """Ranks that never get an example."""
    seen: tuple[int, int]
    """Places and squares of the largest micro-batch."""


def rows_of(recipe: Recipe, active: Active, folder: Path) -> Rows:
    """Return an epoch's examples, as far as they are known."""
    if recipe.data.tokens:
        job = job_of(recipe, active)
        tokens = named(recipe, job, active)
        counts = [(one["examples"], one["weight"]) for one in tokens.facts["sources"]]
        numbers = np.arange(len(tokens))
        order = shuffled(counts, recipe.train.seed, 0)
        return Rows(_fitting(recipe, tokens), numbers, order, len(job.tokenizer), True)
    sources = recipe.data.all_sources()
    opened = [open_source(one) for one in sources]
    ensure_columns(recipe.data, opened)
    work = worker(recipe, active, opened, folder, ROWS)
    work.folder = folder / "sample"
    work.folder.mkdir()
    shards = [
        work(Slice(number, 0, min(ROWS, len(one)), one.part(0, min(ROWS, len(one)))))
        for number, one in enumerate(opened)
    ]
    facts = [
        {"name": source.source, "weight": source.weight, "examples": shard.examples}
        for shard, source in zip(shards, sources, strict=True)
    ]
    write_index(work.folder, shards, {"key": "", "sources": facts})
    tokens, parts, first = Tokens(work.folder), list[Ints](), 0
    for shard, one, source in zip(shards, opened, sources, strict=True):
        # As many as it has, if the others are like the first.
        share = shard.examples / max(1, min(ROWS, len(one)))
        count = round(source.weight * len(one) * share)
        parts.append(first + np.resize(np.arange(shard.examples), count))
        first += shard.examples
    numbers = np.concatenate(parts)
    order = shuffled([(len(numbers), 1.0)], recipe.train.seed, 0)
    return Rows(_fitting(recipe, tokens), numbers, order, len(work.tokenizer), False)


def _fitting(recipe: Recipe, tokens: Tokens) -> Tokens:
    """Cut or share what plugins would before the first step."""
    if recipe.plugins.get("dpo", {}).get("share_prompt"):
        return tokens.shared()
    packing = recipe.plugins.get("bfd_packing", {})
    room = packing.get("capacity") or int(tokens.lengths.max())
    if packing.get("overlong", "error") == "error" or not (tokens.lengths > room).any():
        return tokens
    numbers = np.arange(len(tokens))
    return tokens.stretches(numbers, 0 * numbers, np.minimum(tokens.lengths, room))


def workload(recipe: Recipe, active: Active, rows: Rows, ranks: int) -> Workload:
    """Lay out steps of an epoch, and find what they ask."""
    lengths = rows.tokens.lengths[rows.numbers]
    layouts = active.hook.batches(
        order=rows.order, lengths=lengths, ranks=ranks, train=recipe.train
    )
    packs = recipe.has("bfd_packing")
    filled = recipe.plugins.get("bfd_packing", {}).get("scope") == "dataset"
    room = capacity(recipe) if packs else 0
    count = max(2, min(SEEN, SHARES // ranks))
    chosen = np.unique(np.linspace(0, len(layouts) - 1, count).astype(np.int64)).tolist()
    slots, squares = (np.zeros((len(chosen), ranks), np.int64) for _ in range(2))
    parts, used, largest = np.zeros(len(chosen), np.int64), 0, (0, 0)
    there = np.zeros(0, np.int64)
    for step, number in enumerate(chosen):
        layout = layouts[number]
        parts[step] = max(map(len, layout))
        for rank, mine in enumerate(layout):
            for part in mine:
                some = lengths[part]
                wide = len(some) * int(some.max(initial=0))
                size = max(room if filled else 0, int(some.sum())) if packs else wide
                square = int((some**2).sum()) if packs else wide * int(some.max(initial=0))
                slots[step, rank] += size
                squares[step, rank] += square
                used += int(some.sum())
                if (size, square) > largest:
                    largest, there = (size, square), part
    batch = active.hook.collate(tokens=rows.tokens, examples=rows.numbers[there], pad=0)
    return Workload(
        batch=batch,
        micro=int(parts.max()),
        slots=slots,
        squares=squares,
        parts=parts,
        tokens=used / len(chosen),
        idle=int((slots.sum(0) == 0).sum()),
        seen=largest,
    )
