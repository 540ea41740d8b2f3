"""Open sources of rows: jsonl line by line, everything else through `datasets`.

Importing `datasets` takes a second, so only the functions that read through it do.
"""

from collections.abc import Sequence, Sized
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from ..base.checksums import cached_file_digest, digest
from ..base.errors import DataError, RecipeError, did_you_mean
from ..base.limits import parse_json
from ..base.types import Ints, Row, Rows, Slice
from ..recipe.tables import Data, Source
from .jsonl import JsonLines, RowList, find_lines

T = TypeVar("T", bound=Sized)
FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
SLICE_BYTES = 4_000_000
"""Size of a slice: small enough to balance workers and to fit in memory."""
SLICE_ROWS = 10_000
"""Maximum number of rows in a slice."""
COLUMN_ROWS = 1_000
"""Number of rows of each source that are read at a time to find columns."""


class OpenSource(Rows, Protocol):
    """The rows of a source."""

    @property
    def identity(self) -> dict[str, str]:
        """Checksums of the files, or the fingerprint of the dataset."""

    def sizes(self) -> Ints:
        """Return the size of each row in bytes, approximately."""


def open_source(source: Source) -> OpenSource:
    """Open a source by its name: a file, a folder, or a name on the hub."""
    path = Path(source.source)
    if path.is_file():
        if path.suffix not in FILES:
            raise DataError(
                f"source {path}: unknown file type '{path.suffix}'; use one of {', '.join(FILES)}"
            )
        if path.stat().st_size == 0:
            raise DataError(f"source {path}: the file is empty")
        if path.suffix in (".jsonl", ".json"):
            return File(path, source.split, _read_array(path) if path.suffix == ".json" else None)
    elif path.is_dir():
        files = [*path.glob("*"), *path.glob("data/*")]
        if not any(set(FILES) & set(file.suffixes) for file in files):
            # `datasets` would walk through the whole tree.
            raise DataError(
                f"source {path}: the folder holds no data: no {', '.join(FILES)} file, and no "
                "dataset of save_to_disk"
            )
    elif path.suffix in FILES or source.source.startswith((".", "/")):
        names = [file.name for file in path.parent.glob("*") if file.suffix in FILES]
        raise DataError(f"source {path}: no such file{did_you_mean(path.name, names)}")
    return Table(source)


def ensure_columns(data: Data, sources: Sequence[OpenSource]) -> None:
    """Refuse configured columns that no row of any source has."""
    columns, start = set[str](), 0
    while not columns.issuperset([*data.columns.values(), *data.ignore]):
        if start >= max(map(len, sources), default=0):
            known = ", ".join(sorted(columns)) or "none"
            lines = [
                f"data.columns: no row has the column '{yours}' (for {ours}); columns: {known}"
                for ours, yours in data.columns.items()
                if yours not in columns
            ]
            lines += [
                f"data.ignore: no row has the column '{name}'; columns: {known}"
                for name in data.ignore
                if name not in columns
            ]
            raise RecipeError(lines)
        stop = start + COLUMN_ROWS
        columns.update(*(row for source in sources for row in source.read(start, stop) if row))
        start = stop


def slices_of(sources: Sequence[OpenSource]) -> list[Slice]:
    """Cut sources into slices of about equal size, independent of the machine."""
    slices = []
    for number, rows in enumerate(sources):
        by_bytes = np.cumsum(rows.sizes()) // SLICE_BYTES
        by_rows = np.arange(len(rows)) // SLICE_ROWS
        cuts = np.flatnonzero(np.diff(by_bytes) | np.diff(by_rows)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(rows)]):
            if stop > start:
                slices.append(Slice(number, start, stop, rows.part(start, stop)))
    return slices


class File:
    """A jsonl or json file, which is one split.

    Its lines are searched at the first access, so that prepared data is not read again.
    """

    def __init__(self, path: Path, split: str, rows: RowList | None = None) -> None:
        self._path, self._split, self._array = path, split, rows

    @cached_property
    def _rows(self) -> JsonLines | RowList:
        rows = find_lines(self._path) if self._array is None else self._array
        if not len(rows):
            raise DataError(f"source {self._path}: the file has no rows, only blank lines")
        selected = rows.select(_row_numbers(self._split, len(rows), self._path))
        return _ensure_rows(selected, str(self._path), self._split)

    @cached_property
    def identity(self) -> dict[str, str]:
        """The checksum of the file."""
        return {"file": cached_file_digest(self._path), "split": self._split}

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, start: int, stop: int) -> Rows:
        """Return a range of the rows."""
        return self._rows.part(start, stop)

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows, or None for a row that is not a JSON object."""
        return self._rows.read(start, stop)

    def sizes(self) -> Ints:
        """Return the size of each row in bytes, approximately."""
        return self._rows.sizes()


def _read_array(path: Path) -> RowList | None:
    """Return the rows of a .json file that holds an array; None if it may hold lines."""
    content = path.read_bytes()
    try:
        rows = parse_json(content)
    except ValueError as error:
        if content[:100].lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["):
            raise DataError(f"source {path}: is not JSON: {error}") from error
        return None
    rows = rows if isinstance(rows, list) else [rows]
    return RowList(rows, len(content) // max(1, len(rows)))


def _ensure_rows(rows: T, name: str, split: str) -> T:
    if not len(rows):
        raise DataError(f"source {name} (split '{split}'): holds no rows; set another split")
    return rows


class TableRows:
    """A range of rows of a dataset of `datasets`."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def part(self, start: int, stop: int) -> Rows:
        """Return a range of the rows; another process maps the same files."""
        return TableRows(self._data.select(range(start, stop)))

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; a field that Arrow filled in with None counts as missing."""
        table = self._data.with_format("arrow")[start:stop]
        return [_without_none(row) for row in table.to_pylist()]


class Table(TableRows):
    """Parquet, Arrow, a saved dataset, or a name on the hub, through `datasets`."""

    def __init__(self, source: Source) -> None:
        import datasets

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our messages say enough
        name, path = source.source, Path(source.source)
        self._source = source
        reader = FILES[path.suffix] if path.is_file() else None
        try:
            if reader:
                self._data = datasets.load_dataset(reader, data_files=name, split=source.split)
            elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
                self._data = _load_saved(path, source.split)
            else:
                self._data = datasets.load_dataset(name, split=source.split)
        except Exception as error:  # datasets and its readers raise nearly every type
            first_line = str(error).strip().partition("\n")[0]
            action = f"read as {reader}" if reader else "opened as a file, a folder or a hub name"
            raise DataError(
                f"source {name} (split '{source.split}'): cannot be {action}: "
                f"{type(error).__name__}: {first_line}"
            ) from error
        _ensure_rows(self._data, name, source.split)

    @cached_property
    def identity(self) -> dict[str, str]:
        """The checksums of local files, or the fingerprint of a dataset on the hub."""
        path, split = Path(self._source.source), self._source.split
        if path.is_file():
            return {"file": cached_file_digest(path), "split": split}
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.is_file()]
            checksums = {str(file.relative_to(path)): cached_file_digest(file) for file in files}
            return {"folder": digest(checksums), "split": split}
        return {"data": self._data._fingerprint, "split": split}

    def sizes(self) -> Ints:
        """Return the average size of a row in bytes, for each row."""
        return np.full(len(self), self._data.data.nbytes // max(1, len(self)))


def _load_saved(path: Path, split: str) -> Any:
    import datasets

    data = datasets.load_from_disk(str(path))
    splits = data if isinstance(data, datasets.DatasetDict) else {"train": data}
    ranges = _parse_split(split, {name: len(rows) for name, rows in splits.items()})
    return datasets.concatenate_datasets([splits[name].select(rows) for name, rows in ranges])


def _row_numbers(split: str, count: int, path: Path) -> Ints:
    """Return the row numbers of "train[10:20%]" in a file, which is one split named train."""
    if split == "train":
        return np.arange(count)
    try:
        ranges = _parse_split(split, {"train": count})
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"source {path}: split '{split}' is not understood; a file is one split, 'train'; "
            f"write its slices as train[:100] or train[-5%:] ({error})"
        ) from error
    return np.concatenate([np.arange(rows.start, rows.stop) for _, rows in ranges])


def _parse_split(split: str, sizes: dict[str, int]) -> list[tuple[str, range]]:
    """Return the splits and row numbers of a split in the notation of `datasets`."""
    import datasets

    parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    return [(part.splitname, range(sizes[part.splitname])[part.from_ : part.to]) for part in parts]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value
