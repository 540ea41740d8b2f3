"""Some rows taken the whole way to tokens, in a folder that goes away: for check and inspect."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from ..base.console import progress
from ..base.errors import DataError
from ..base.types import Shard, Slice
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..tokens.shards import write_index
from ..tokens.store import Tokens
from ..tokens.tokenizer import lighten
from .cache_key import makers
from .load_tokenizer import load_tokenizer, train_tokenizer
from .prepare import renderer
from .slices import Work, merge
from .sources import Source as Opened


@dataclass
class Sample:
    """Some of a source's rows, and what became of them."""

    stretches: list[range]
    shard: Shard
    tokens: Tokens

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows."""
        return [row for stretch in self.stretches for row in stretch]


def worker(
    recipe: Recipe, active: Active, opened: list[Opened], folder: Path, most: int | None = None
) -> Work:
    """Return what prepares rows, made to count the rows at which preparing would stop.

    The tokenizer of a model from scratch is trained, if only on the first rows of each source.
    """
    keep = "drop" if recipe.data.too_long == "error" else recipe.data.too_long
    data = recipe.data.model_copy(update={"on_bad_row": "drop", "too_long": keep})
    model = recipe.model
    if model.scratch is not None and not model.tokenizer:
        rows = [one.part(0, len(one) if most is None else min(most, len(one))) for one in opened]
        train_tokenizer(rows, renderer(recipe, active), model.scratch.vocab).save_pretrained(folder)
    tokenizer = lighten(load_tokenizer(model, folder))
    return Work(data, data.all_sources(), tokenizer, folder, makers(active), _hook=active.hook)


def take(work: Work, opened: list[Opened], source: int, start: int, stop: int) -> Sample:
    """Render, encode and mask some rows of a source."""
    name, count = work.sources[source].source, len(opened[source])
    rows = range(count)[start:stop]
    if not rows:
        raise DataError(
            f"{name}: there is no row {start:,}: it has {count:,}" if count else f"{name}: no rows"
        )
    return make(work, opened, source, [rows])


def make(work: Work, opened: list[Opened], source: int, stretches: list[range]) -> Sample:
    """Render, encode and mask stretches of a source."""
    base, work.folder = work.folder, Path(mkdtemp(dir=work.folder))
    shards = []
    try:
        with progress("looking", sum(map(len, stretches)), "rows") as advance:
            for one in stretches:
                part = opened[source].part(one.start, one.stop)
                shards.append(work(Slice(source, one.start, one.stop, part)))
                advance(len(one), "")
        write_index(work.folder, shards, {"key": ""})
        return Sample(stretches, merge(shards), Tokens(work.folder))
    finally:
        work.folder = base
