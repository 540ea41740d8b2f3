"""Sources of rows: jsonl read as lines, everything else through `datasets`."""

import json
import mmap
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
from numpy.typing import NDArray

from . import recipe as recipes
from .errors import DataError, did_you_mean
from .publish import file_digest
from .types import Row

FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


class Rows(Protocol):
    """A source, opened: random access to its rows, and what identifies its content."""

    @property
    def identity(self) -> dict[str, str]:
        """What the rows depend on: the file's bytes, or the data set's fingerprint."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; None stands for one that is not a JSON object."""


def open_source(source: recipes.Source) -> Rows:
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
            return JsonLines(path, source.split)
    elif path.is_dir():
        inside = [*path.glob("*"), *path.glob("data/*")]
        if not any(set(FILES) & set(other.suffixes) for other in inside):
            # Else `datasets` would walk through everything below.
            raise DataError(
                f"source {path}: the folder holds no data: no {', '.join(FILES)} file, and "
                "nothing of save_to_disk"
            )
    elif path.suffix in FILES or source.source.startswith((".", "/")):
        near = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
        raise DataError(f"source {path}: no such file{did_you_mean(path.name, near)}")
    return Table(source)


class JsonLines:
    """A jsonl file, mapped: a row is found by its line, so nothing is held in memory.

    Rows may differ in their fields, which Arrow's reader of JSON refuses; and a line that is no
    JSON is one bad row with a number, not the end of the whole file.
    """

    def __init__(self, path: Path, split: str) -> None:
        self.path, self._split = path, split
        self._lines: list[Any] | None = None
        if path.suffix == ".json":
            # A .json file is an array of rows, or lines after all.
            try:
                rows = json.loads(path.read_bytes())
                self._lines = rows if isinstance(rows, list) else [rows]
            except (ValueError, RecursionError) as error:
                if path.read_bytes()[:100].lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["):
                    raise DataError(f"source {path}: is not JSON: {error}") from error
        if self._lines is None:
            self._starts, self._stops = _find_lines(path)
        count = len(self._lines if self._lines is not None else self._starts)
        self._numbers = _select(split, count, path)

    @cached_property
    def identity(self) -> dict[str, str]:
        """The file's bytes."""
        return {"file": file_digest(self.path), "split": self._split}

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; None stands for one that is not a JSON object."""
        numbers = self._numbers[start:stop]
        if self._lines is not None:
            found = [self._lines[number] for number in numbers]
        else:
            with self.path.open("rb") as file:
                found = [self._parse(file, number) for number in numbers]
        return [row if isinstance(row, dict) else None for row in found]

    def _parse(self, file: Any, number: int) -> Any:
        start = int(self._starts[number])
        file.seek(start)
        try:
            return json.loads(file.read(int(self._stops[number]) - start))
        except (ValueError, RecursionError):
            return None


class Table:
    """Parquet, Arrow, a saved data set, or a name on the hub, through `datasets`."""

    def __init__(self, source: recipes.Source) -> None:
        datasets.disable_progress_bars()
        name, path = source.source, Path(source.source)
        self._source = source
        try:
            if path.is_file():
                kind = FILES[path.suffix]
                self._data = datasets.load_dataset(kind, data_files=name, split=source.split)
            elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
                self._data = _saved(path, source.split)
            else:
                self._data = datasets.load_dataset(name, split=source.split)
        except Exception as error:  # datasets raises nearly every kind, down to its own readers'
            first = str(error).strip().partition("\n")[0]
            raise DataError(
                f"source {name} (split '{source.split}'): cannot be opened as a file, a "
                f"folder or a hub name: {type(error).__name__}: {first}"
            ) from error

    @cached_property
    def identity(self) -> dict[str, str]:
        """A file's bytes; for a folder or a hub name, what `datasets` made of it."""
        path = Path(self._source.source)
        content = file_digest(path) if path.is_file() else self._data._fingerprint
        return {"file" if path.is_file() else "data": content, "split": self._source.split}

    def __len__(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; a field that Arrow filled in with None counts as missing."""
        table = self._data.with_format("arrow")[start:stop]
        return [_without_none(row) for row in table.to_pylist()]


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


def _find_lines(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        # In pieces: the comparison makes a byte of truth for each byte of text.
        size, step = len(mapped), 1 << 26
        ends = [
            np.flatnonzero(np.frombuffer(mapped[at : at + step], np.uint8) == ord("\n")) + at
            for at in range(0, size, step)
        ]
        stops = np.concatenate([*ends, [size]])
        starts = np.concatenate([[0], stops[:-1] + 1])
        # Blank lines are no rows. Looking is only worth it where a line starts with a space.
        filled = np.array(
            [
                b > a and (mapped[a] > ord(" ") or bool(mapped[a:b].strip()))
                for a, b in zip(starts, stops, strict=True)
            ],
            bool,
        )
    return starts[filled], stops[filled]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value
