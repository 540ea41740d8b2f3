"""Rows through `datasets`: parquet, Arrow, saved datasets, and names on the hub."""

from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from ...base.checksums import cached_file_digest, digest
from ...base.errors import DataError, reason_of
from ...base.types import Ints, Row, Rows
from ...recipe.tables import Source
from ..jsonl import JoinedRows, without_none


class DatasetRows:
    """A range of rows of a dataset of `datasets`."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def part(self, start: int, stop: int) -> Rows:
        """Return a range of the rows; another process maps the same files."""
        return DatasetRows(self._data.select(range(start, stop)))

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; a field that Arrow filled in with None counts as missing."""
        table = self._valid(self._data.with_format("arrow")[start:stop], True)
        return [without_none(row) for row in table.to_pylist()]

    def _valid(self, table: Any, full: bool) -> Any:
        """Return a table once it is validated: a wrong offset would end the process."""
        try:
            table.validate(full=full)
        except pa.ArrowException as error:
            files = ", ".join(file["filename"] for file in self._data.cache_files)
            raise DataError(
                f"{files}: its rows are damaged ({reason_of(error)}); write it again"
            ) from error
        return table


class DatasetSource(DatasetRows):
    """Parquet, Arrow, a saved dataset, or a name on the hub, through `datasets`."""

    def __init__(self, source: Source, reader: str | None, where: str) -> None:
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our messages say enough
        name, path = source.source, Path(source.source)
        self._source = source
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
                f"{where} (split '{source.split}'): cannot be {action}: "
                f"{type(error).__name__}: {first_line}"
            ) from error

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
        data = self._valid(self._data.data, False)
        return np.full(len(self), data.nbytes // max(1, len(self)))


def _load_saved(path: Path, split: str) -> Any:
    data = datasets.load_from_disk(str(path))
    splits = data if isinstance(data, datasets.DatasetDict) else {"train": data}
    ranges = parse_split(split, {name: len(rows) for name, rows in splits.items()})
    return datasets.concatenate_datasets([splits[name].select(rows) for name, rows in ranges])


def ranges_of(split: str, sizes: dict[str, int], where: str) -> list[tuple[str, range]]:
    """Return the splits and row numbers of a split; refuse one that is not understood."""
    try:
        return parse_split(split, sizes)
    except Exception as error:  # datasets raises nearly every type
        splits = f"splits: {', '.join(sizes)}"
        if [*sizes] == ["train"]:
            splits = "a file is one split, 'train'"
        raise DataError(
            f"{where}: split '{split}' is not understood; {splits}; write its slices as "
            f"train[:100] or train[-5%:] ({reason_of(error)})"
        ) from error


def take_split(rows: Rows, split: str, where: str) -> JoinedRows:
    """Return the rows of "train[10:20%]" of a file, which is one split named train."""
    ranges = ranges_of(split, {"train": len(rows)}, where)
    return JoinedRows(tuple(rows.part(each.start, each.stop) for _, each in ranges))


def parse_split(split: str, sizes: dict[str, int]) -> list[tuple[str, range]]:
    """Return the splits and row numbers of a split in the notation of `datasets`."""
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    return [(part.splitname, range(sizes[part.splitname])[part.from_ : part.to]) for part in parts]
