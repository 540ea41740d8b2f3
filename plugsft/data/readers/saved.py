"""Rows of tokens in folders of `save_to_disk` and in Arrow files, mapped where they lie."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from ...base.checksums import cached_file_digest, digest
from ...base.errors import DataError, reason_of
from ...base.types import Ints, Row
from ...recipe.tables import Source
from ..jsonl import without_none


@dataclass(frozen=True)
class MappedRows:
    """Rows of Arrow files: file, first row, one past the last row."""

    parts: tuple[tuple[str, int, int], ...]

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.parts)

    def part(self, start: int, stop: int) -> "MappedRows":
        """Return a range of the rows; another process maps the same files."""
        parts, offset = [], 0
        for file, first, last in self.parts:
            begin, end = max(first, first + start - offset), min(last, first + stop - offset)
            if begin < end:
                parts.append((file, begin, end))
            offset += last - first
        return MappedRows(tuple(parts))

    def blocks(self) -> Iterator[pa.RecordBatch]:
        """Yield record batches."""
        for file, first, last in self.parts:
            offset = 0
            for batch in map_file(file):
                begin, end = max(first - offset, 0), min(last - offset, len(batch))
                if begin < end:
                    rows = batch.slice(begin, end - begin)
                    try:
                        rows.validate(full=True)  # a wrong offset would end the process
                    except pa.ArrowException as error:
                        raise DataError(
                            f"{file}: its rows are damaged ({reason_of(error)}); write it again"
                        ) from error
                    yield rows
                offset += len(batch)

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; a field that is null counts as missing."""
        rows = (row for batch in self.part(start, stop).blocks() for row in batch.to_pylist())
        return [without_none(row) for row in rows]


@dataclass(frozen=True)
class SavedSource(MappedRows):
    """A source of rows of tokens."""

    files: tuple[str, ...]
    split: str

    @cached_property
    def identity(self) -> dict[str, str]:
        """The checksums and the place of the files: prepared tokens refer to it."""
        checksums = {file: cached_file_digest(Path(file)) for file in self.files}
        return {"ready": digest(checksums), "split": self.split}

    def sizes(self) -> Ints:
        """Return the size of each row in bytes, approximately."""
        size = sum(Path(file).stat().st_size for file in self.files) // max(1, len(self))
        return np.full(len(self), size)


def open_saved(source: Source, where: str) -> SavedSource | None:
    """Open a folder or an Arrow file if its rows hold tokens; None for other rows."""
    path = Path(source.source).absolute()
    try:
        splits = _files_of(path)
        files = [file for names in splits.values() for file in names]
        if not files or not all("input_ids" in map_file(file)[0].schema.names for file in files):
            return None
    except (OSError, LookupError, ValueError, TypeError, pa.ArrowException):
        return None  # `datasets` opens it, or says why not
    counts = {
        name: [sum(map(len, map_file(file))) for file in names] for name, names in splits.items()
    }
    every = {
        name: MappedRows(tuple((f, 0, n) for f, n in zip(names, counts[name], strict=True)))
        for name, names in splits.items()
    }
    parts = [*_select(every, source.split, where)]
    if not any(stop > start for _, start, stop in parts):
        raise DataError(f"{where} (split '{source.split}'): has no rows; set another split")
    return SavedSource(tuple(parts), tuple(files), source.split)


def _select(
    splits: dict[str, MappedRows], split: str, where: str
) -> Iterator[tuple[str, int, int]]:
    if split in splits:
        yield from splits[split].parts
        return
    from .dataset import ranges_of

    for name, rows in ranges_of(split, {name: len(rows) for name, rows in splits.items()}, where):
        yield from splits[name].part(rows.start, rows.stop).parts


def _files_of(path: Path) -> dict[str, list[str]]:
    """Return the Arrow files of each split of a saved data set."""
    if path.is_file():
        return {"train": [str(path)]}
    if (path / "dataset_dict.json").is_file():
        names = json.loads((path / "dataset_dict.json").read_text())["splits"]
        return {name: _files_of(path / name)["train"] for name in names}
    state = json.loads((path / "state.json").read_text())
    return {"train": [str(path / file["filename"]) for file in state["_data_files"]]}


def map_file(file: str) -> list[pa.RecordBatch]:
    """Map an Arrow file, a stream or with an index; return its record batches."""
    facts = Path(file).stat()
    return _map_file(file, (facts.st_size, facts.st_mtime_ns, facts.st_ino))


@lru_cache(maxsize=64)
def _map_file(file: str, _version: tuple[int, ...]) -> list[pa.RecordBatch]:
    with pa.memory_map(file) as mapped:
        buffer = mapped.read_buffer()
    if buffer[:6].to_pybytes() == b"ARROW1":
        opened = pa.ipc.open_file(buffer)
        return [opened.get_batch(number) for number in range(opened.num_record_batches)]
    return [*pa.ipc.open_stream(buffer)]
