"""Some rows taken the whole way to tokens, in a folder that goes away: for check and inspect."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from ..errors import DataError
from ..keys import makers
from ..prepare import renderer
from ..pretrained import load_tokenizer, train_tokenizer
from ..recipe import Recipe
from ..registry import Active
from ..sources import Source as Opened
from ..tokenizer import lighten
from ..tokens import Tokens, write_index
from ..types import Shard, Slice
from ..work import Work


@dataclass
class Sample:
    """A stretch of a source's rows, and what became of them."""

    rows: range
    shard: Shard
    tokens: Tokens


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
    base, work.folder = work.folder, Path(mkdtemp(dir=work.folder))
    try:
        part = opened[source].part(rows.start, rows.stop)
        shard = work(Slice(source, rows.start, rows.stop, part))
        write_index(work.folder, [shard], {"key": ""})
        return Sample(rows, shard, Tokens(work.folder))
    finally:
        work.folder = base


def listed(rows: list[int]) -> str:
    """Name some rows: "3 (rows 1, 5, 7)"."""
    shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    return f"{len(rows):,} ({'row' if len(rows) == 1 else 'rows'} {shown})"
