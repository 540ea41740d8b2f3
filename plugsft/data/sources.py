"""Sources of rows: jsonl read as lines, everything else through `datasets`."""

from collections.abc import Sequence, Sized
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import datasets
import numpy as np
from numpy.typing import NDArray

from ..base.checksums import cached_file_digest, digest
from ..base.errors import DataError, RecipeError, did_you_mean
from ..base.limits import parse_json
from ..base.types import Ints, Row, Rows, Slice
from ..recipe import tables as recipes
from .jsonl import Held, JsonLines, find_lines

T = TypeVar("T", bound=Sized)
FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


SLICE = 4_000_000
"""Bytes of a slice: small enough to deal out evenly and to hold in memory, whatever the source."""
MOST = 10_000
"""Rows of a slice, at most."""
LOOK = 1_000
"""Rows of each source that are looked at together for the names of their columns."""


class Source(Rows, Protocol):
    """Rows, with what identifies them."""

    @property
    def identity(self) -> dict[str, str]:
        """What the rows depend on: the file's bytes, or the data set's fingerprint."""

    def sizes(self) -> Ints:
        """Return the bytes of every row, at least about."""


def open_source(source: recipes.Source) -> Source:
    """Open a source by the look of its name: a file, a folder, or a name on the hub."""
    path = Path(source.source)
    if path.is_file():
        if path.suffix not in FILES:
            known = ", ".join(FILES)
            raise DataError(
                f"source {path}: unknown kind of file '{path.suffix}'; known are {known}"
            )
        if path.stat().st_size == 0:
            raise DataError(f"source {path}: the file is empty")
        if path.suffix in (".jsonl", ".json"):
            return File(path, source.split, _array_in(path) if path.suffix == ".json" else None)
    elif path.is_dir():
        inside = [*path.glob("*"), *path.glob("data/*")]
        if not any(set(FILES) & set(other.suffixes) for other in inside):
            # Else `datasets` would walk through everything below.
            raise DataError(
                f"source {path}: the folder holds no data: no {', '.join(FILES)} file, and "
                "nothing of save_to_disk"
            )
    elif path.suffix in FILES or source.source.startswith((".", "/")):
        near = [other.name for other in path.parent.glob("*") if other.suffix in FILES]
        raise DataError(f"source {path}: no such file{did_you_mean(path.name, near)}")
    return Table(source)


def ensure_columns(data: recipes.Data, opened: Sequence[Source]) -> None:
    """Refuse configured columns that no row of any source has."""
    there, start = set[str](), 0
    while not there.issuperset([*data.columns.values(), *data.ignore]):
        if start >= max(map(len, opened), default=0):
            known = ", ".join(sorted(there)) or "none"
            lines = [
                f"data.columns: no row has the column '{yours}' (for {ours}); there are {known}"
                for ours, yours in data.columns.items()
                if yours not in there
            ]
            lines += [
                f"data.ignore: no row has the column '{name}'; there are {known}"
                for name in data.ignore
                if name not in there
            ]
            raise RecipeError(lines)
        there.update(*(row for one in opened for row in one.read(start, start + LOOK) if row))
        start += LOOK


def slices_of(sources: Sequence[Source]) -> list[Slice]:
    """Cut sources into slices of about equal size; they follow from the rows alone."""
    slices = []
    for number, rows in enumerate(sources):
        filled = np.cumsum(rows.sizes()) // SLICE
        count = np.arange(len(rows)) // MOST
        cuts = np.flatnonzero(np.diff(filled) | np.diff(count)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(rows)]):
            if stop > start:
                slices.append(Slice(number, start, stop, rows.part(start, stop)))
    return slices


class File:
    """A jsonl or json file, which is one split.

    Its lines are looked for when they are asked for: of data that is prepared, none is read again.
    """

    def __init__(self, path: Path, split: str, held: Held | None = None) -> None:
        self._path, self._split, self._held = path, split, held

    @cached_property
    def _rows(self) -> JsonLines | Held:
        found = find_lines(self._path) if self._held is None else self._held
        if not len(found):
            raise DataError(f"source {self._path}: the file has no rows, only blank lines")
        picked = found.pick(_select(self._split, len(found), self._path))
        return _ensure_rows(picked, str(self._path), self._split)

    @cached_property
    def identity(self) -> dict[str, str]:
        """The file's bytes."""
        return _identity(self._path, self._split)

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, start: int, stop: int) -> Rows:
        """Return a stretch of the rows, as small to send as it is."""
        return self._rows.part(start, stop)

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; None stands for one that is not a JSON object."""
        return self._rows.read(start, stop)

    def sizes(self) -> Ints:
        """Return the bytes of every row, at least about."""
        return self._rows.sizes()


def _identity(path: Path, split: str) -> dict[str, str]:
    return {"file": cached_file_digest(path), "split": split}


def _array_in(path: Path) -> Held | None:
    """Return the rows of a .json file that is an array of them; else it may hold lines."""
    content = path.read_bytes()
    try:
        rows = parse_json(content)
    except ValueError as error:
        if content[:100].lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["):
            raise DataError(f"source {path}: is not JSON: {error}") from error
        return None
    rows = rows if isinstance(rows, list) else [rows]
    return Held(rows, len(content) // max(1, len(rows)))


def _ensure_rows(rows: T, name: str, split: str) -> T:
    if not len(rows):
        raise DataError(f"source {name} (split '{split}'): holds no rows; give another split")
    return rows


class Stretch:
    """Rows of a data set of `datasets`."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def part(self, start: int, stop: int) -> Rows:
        """Return a stretch of the rows, which another process maps from the same files."""
        return Stretch(self._data.select(range(start, stop)))

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; a field that Arrow filled in with None counts as missing."""
        table = self._data.with_format("arrow")[start:stop]
        return [_without_none(row) for row in table.to_pylist()]


class Table(Stretch):
    """Parquet, Arrow, a saved data set, or a name on the hub, through `datasets`."""

    def __init__(self, source: recipes.Source) -> None:
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we say it ourselves
        name, path = source.source, Path(source.source)
        self._source = source
        kind = FILES[path.suffix] if path.is_file() else None
        try:
            if kind:
                self._data = datasets.load_dataset(kind, data_files=name, split=source.split)
            elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
                self._data = _saved(path, source.split)
            else:
                self._data = datasets.load_dataset(name, split=source.split)
        except Exception as error:  # datasets raises nearly every kind, down to its own readers'
            first = str(error).strip().partition("\n")[0]
            what = f"read as {kind}" if kind else "opened as a file, a folder or a hub name"
            raise DataError(
                f"source {name} (split '{source.split}'): cannot be {what}: "
                f"{type(error).__name__}: {first}"
            ) from error
        _ensure_rows(self._data, name, source.split)

    @cached_property
    def identity(self) -> dict[str, str]:
        """The bytes of local files; for a hub name, what `datasets` made of it."""
        path, split = Path(self._source.source), self._source.split
        if path.is_file():
            return _identity(path, split)
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.is_file()]
            known = {str(file.relative_to(path)): cached_file_digest(file) for file in files}
            return {"folder": digest(known), "split": split}
        return {"data": self._data._fingerprint, "split": split}

    def sizes(self) -> Ints:
        """Return the bytes of every row, on average."""
        return np.full(len(self), self._data.data.nbytes // max(1, len(self)))


def _saved(path: Path, split: str) -> Any:
    data = datasets.load_from_disk(str(path))
    splits = data if isinstance(data, datasets.DatasetDict) else {"train": data}
    stretches = _stretches(split, {name: len(part) for name, part in splits.items()})
    return datasets.concatenate_datasets([splits[name].select(part) for name, part in stretches])


def _select(split: str, count: int, path: Path) -> NDArray[np.int64]:
    """Return the row numbers of "train[10:20%]" in a file, which is one split named train."""
    try:
        stretches = _stretches(split, {"train": count})
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"source {path}: split '{split}' is not understood; a file is one split, 'train', "
            f"of which slices are written train[:100] or train[-5%:] ({error})"
        ) from error
    return np.concatenate([np.arange(part.start, part.stop) for _, part in stretches])


def _stretches(split: str, sizes: dict[str, int]) -> list[tuple[str, range]]:
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    return [(part.splitname, range(sizes[part.splitname])[part.from_ : part.to]) for part in parts]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value
