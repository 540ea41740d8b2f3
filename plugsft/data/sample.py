"""A sample of the rows, and columns of all examples estimated from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from ..base.console import format_count, progress
from ..base.errors import DataError
from ..base.types import Ints, Shard, Slice
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..tokens.shards import write_index
from ..tokens.store import Tokens
from .load_tokenizer import load_tokenizer, train_tokenizer
from .prepare import make_renderer, make_writer
from .slices import ShardWriter, merge
from .sources import OpenSource, read_lead_row

Sources = list[OpenSource]


@dataclass
class Sample:
    """Rows of a source, prepared."""

    ranges: list[range]
    """The numbers of the rows."""
    shard: Shard
    tokens: Tokens

    @property
    def rows(self) -> list[int]:
        """The number of each row."""
        return [row for rows in self.ranges for row in rows]


def make_work(
    recipe: Recipe, active: Active, sources: Sources, folder: Path, max_rows: int | None = None
) -> ShardWriter:
    """Make a ShardWriter that drops the rows at which preparing would stop, and counts them.

    The tokenizer of a model from scratch is trained on the first `max_rows` rows of each source.
    """
    too_long = "drop" if recipe.data.too_long == "error" else recipe.data.too_long
    data = recipe.data.model_copy(update={"on_bad_row": "drop", "too_long": too_long})
    model = recipe.model
    if model.scratch is not None and not model.tokenizer:
        rows = [source.part(0, max_rows or len(source)) for source in sources]
        tokenizer = train_tokenizer(rows, make_renderer(recipe, active), model.scratch.vocab)
        tokenizer.save_pretrained(folder)
    return make_writer(recipe, active, data, load_tokenizer(model, folder), folder)


def sample_rows(work: ShardWriter, sources: Sources, source: int, start: int, stop: int) -> Sample:
    """Prepare the rows of a source from `start` to `stop`."""
    name, count = work.sources[source].source, len(sources[source])
    rows = range(count)[start:stop]
    if not rows:
        raise DataError(f"{name}: has no row {start + 1:,}, only {format_count(count, 'row')}")
    return sample_ranges(work, sources, source, [rows])


def sample_ranges(work: ShardWriter, sources: Sources, source: int, ranges: list[range]) -> Sample:
    """Prepare several ranges of rows of a source."""
    folder, work.folder = work.folder, Path(mkdtemp(dir=work.folder))
    shards, lead = [], read_lead_row(sources[source], work.data.of(work.sources[source]))
    try:
        with progress("reading", sum(map(len, ranges)), "rows") as advance:
            for rows in ranges:
                part = sources[source].part(rows.start, rows.stop)
                shards.append(work.tokenize(Slice(source, rows.start, rows.stop, part, lead)))
                advance(len(rows), "")
        total = merge(shards)
        write_index(work.folder, shards, {"key": "", "largest_id": total.largest})
        return Sample(ranges, total, Tokens(work.folder))
    finally:
        work.folder = folder


class EstimatedColumns(dict[str, Any]):
    """Columns for an estimate, `lengths` among them; one without known values is all 0."""

    def __init__(self, lengths: Ints, columns: Mapping[str, Any] | None = None) -> None:
        shapes = {"lengths": lengths, "longest": lengths, "sequences": np.ones_like(lengths)}
        super().__init__({**shapes, **(columns or {})})
        self._count = len(lengths)

    def __missing__(self, name: str) -> Ints:
        return np.zeros(self._count, np.int64)
