"""Open sources of rows: jsonl line by line, everything else through `datasets`.

Importing `datasets` takes a second. Most recipes name jsonl files, so the readers of other sources,
in readers/, are imported when a recipe names one.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..base.checksums import cached_file_digest
from ..base.console import hide_query
from ..base.errors import DataError, RecipeError, did_you_mean
from ..base.limits import parse_json
from ..base.types import Ints, Row, Rows, Slice
from ..recipe.tables import Data, Source
from .jsonl import JoinedRows, JsonLines, LateRows, RowList, ensure_rows, find_lines
from .render import lead_row

FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
SLICE_BYTES = 4_000_000
"""Size of a slice: small enough to balance workers and to fit in memory."""
SLICE_ROWS = 10_000
"""Maximum number of rows in a slice."""
COLUMN_ROWS = 1_000
"""Number of rows of each source that are read at a time to find columns."""
FIRST_ROWS = 100
"""Number of rows at the beginning of a source; one of them decides how all rows are read."""


class OpenSource(Rows, Protocol):
    """The rows of a source."""

    @property
    def identity(self) -> dict[str, str]:
        """Checksums of the files, or the fingerprint of the dataset."""

    def sizes(self) -> Ints:
        """Return the size of each row in bytes, approximately."""


def open_source(source: Source, key: str = "data.source") -> OpenSource:
    """Open a source by its name: a file, a folder, or a name on the hub.

    `key` is the recipe's key that names it, for messages.
    """
    path, where = Path(source.source), f"{key}: {hide_query(source.source)}"
    if "://" in source.source:
        from .readers.remote import RemoteSource

        return RemoteSource(source, where)
    if path.is_file():
        if path.suffix not in FILES:
            raise DataError(f"{where}: unknown file type '{path.suffix}'; use {', '.join(FILES)}")
        if path.stat().st_size == 0:
            raise DataError(f"{where}: the file is empty; name a file with rows")
        if path.suffix in (".jsonl", ".json"):
            array = _read_array(path, where) if path.suffix == ".json" else None
            return FileSource(path, source.split, where, array)
    elif path.is_dir():
        files = [*path.glob("*"), *path.glob("data/*")]
        if not any(set(FILES) & set(file.suffixes) for file in files):
            # `datasets` would walk through the whole tree.
            raise DataError(
                f"{where}: the folder has no data: no {', '.join(FILES)} file, and no dataset of "
                "save_to_disk; name another folder, or a file"
            )
    elif path.suffix in FILES or source.source.startswith((".", "/")):
        names = [file.name for file in path.parent.glob("*") if file.suffix in FILES]
        raise DataError(f"{where}: no such file{did_you_mean(path.name, names)}")
    from .readers.dataset import DatasetSource

    reader = FILES[path.suffix] if path.is_file() else None
    return ensure_rows(DatasetSource(source, reader, where), where, source.split)


def ensure_columns(data: Data, sources: Sequence[OpenSource]) -> None:
    """Refuse configured columns that no row of any source has."""
    named = [("columns", name, f" (for {ours})") for ours, name in data.columns.items()]
    named += [("ignore", name, "") for name in data.ignore]
    columns, start = set[str](), 0
    while missing := [it for it in named if it[1] not in columns]:
        if start >= max(map(len, sources), default=0):
            known = ", ".join(sorted(columns)) or "none"
            raise RecipeError(
                [
                    f"data.{key}: no row has the column '{name}'{use}; columns: {known}"
                    for key, name, use in missing
                ]
            )
        stop = start + COLUMN_ROWS
        columns.update(*(row for source in sources for row in source.read(start, stop) if row))
        start = stop


def read_lead_row(rows: Rows, data: Data) -> Row:
    """Return one of a source's first rows: all its rows are read as it is."""
    return lead_row(rows.read(0, FIRST_ROWS), data)


def slices_of(sources: Sequence[OpenSource], data: Data) -> list[Slice]:
    """Cut sources into slices of about equal size, independent of the machine."""
    slices = []
    for number, rows in enumerate(sources):
        by_bytes = np.cumsum(rows.sizes()) // SLICE_BYTES
        by_rows = np.arange(len(rows)) // SLICE_ROWS
        lead = read_lead_row(rows, data)
        cuts = np.flatnonzero(np.diff(by_bytes) | np.diff(by_rows)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(rows)]):
            if stop > start:
                slices.append(Slice(number, start, stop, rows.part(start, stop), lead))
    return slices


class FileSource(LateRows):
    """A jsonl or json file, which is one split."""

    def __init__(self, path: Path, split: str, where: str, rows: RowList | None = None) -> None:
        self._path, self._split, self._where, self._array = path, split, where, rows

    @cached_property
    def _rows(self) -> JsonLines | RowList | JoinedRows:
        rows: Any = find_lines(self._path) if self._array is None else self._array
        if not len(rows):
            raise DataError(f"{self._where}: only blank lines; name a file with rows")
        if self._split != "train":
            from .readers.dataset import take_split

            rows = take_split(rows, self._split, self._where)
        return ensure_rows(rows, self._where, self._split)  # type: ignore[no-any-return]

    @cached_property
    def identity(self) -> dict[str, str]:
        """The checksum of the file."""
        return {"file": cached_file_digest(self._path), "split": self._split}


def _read_array(path: Path, where: str) -> RowList | None:
    """Return the rows of a .json file that holds an array; None if it may hold lines."""
    content = path.read_bytes()
    try:
        rows = parse_json(content)
    except ValueError as error:
        if content[:100].lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["):
            raise DataError(f"{where}: is not JSON: {error}; correct the file") from error
        return None
    rows = rows if isinstance(rows, list) else [rows]
    return RowList(rows, len(content) // max(1, len(rows)))
