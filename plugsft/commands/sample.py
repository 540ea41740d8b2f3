"""Some rows taken the whole way to tokens, in a folder that goes away: for check and inspect."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from ..errors import DataError
from ..prepare import Work
from ..recipe import Recipe, Source
from ..registry import Active
from ..sources import Rows
from ..tokenizer import train_tokenizer
from ..tokens import Tokens, write_index
from ..types import Row, Shard, Slice


@dataclass
class Sample:
    """A stretch of a source's rows, and what became of them."""

    rows: range
    shard: Shard
    tokens: Tokens


def worker(recipe: Recipe, active: Active, sources: list[Source], folder: Path) -> Work:
    """Return what prepares rows, made to count the rows at which preparing would stop."""
    keep = "drop" if recipe.data.too_long == "error" else recipe.data.too_long
    data = recipe.data.model_copy(update={"on_bad_row": "drop", "too_long": keep})
    lenient = recipe.model_copy(update={"data": data})
    return Work(lenient, sources, folder / "tokenizer", folder, _hook=active.hook)


def make_tokenizer(work: Work, most: int | None = None) -> None:
    """Train the tokenizer of a model from scratch, if only on the first rows of each source."""
    model = work.recipe.model
    if model.scratch is not None and not model.tokenizer:
        rows: list[Rows] = [_Head(one, most) for one in work.rows]
        trained = train_tokenizer(rows, work.render, model.scratch.vocab)
        trained.save_pretrained(work.tokenizer_folder)


def take(work: Work, source: int, start: int, stop: int) -> Sample:
    """Render, encode and mask some rows of a source."""
    name, count = work.sources[source].source, len(work.rows[source])
    rows = range(count)[start:stop]
    if not rows:
        raise DataError(
            f"{name}: there is no row {start:,}: it has {count:,}" if count else f"{name}: no rows"
        )
    base, work.folder = work.folder, Path(mkdtemp(dir=work.folder))
    try:
        shard = work(Slice(source, rows.start, rows.stop))
        write_index(work.folder, [shard.file], {"key": ""})
        return Sample(rows, shard, Tokens(work.folder))
    finally:
        work.folder = base


def listed(rows: list[int]) -> str:
    """Name some rows: "3 (rows 1, 5, 7)"."""
    shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    return f"{len(rows):,} ({'row' if len(rows) == 1 else 'rows'} {shown})"


class _Head:
    """The first rows of a source."""

    def __init__(self, rows: Rows, most: int | None) -> None:
        self._rows, self._count = rows, len(rows) if most is None else min(most, len(rows))

    @property
    def identity(self) -> dict[str, str]:
        return self._rows.identity

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> list[Row | None]:
        return self._rows.read(start, min(stop, self._count))
