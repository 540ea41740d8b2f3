"""Sources of rows, and the slices that they are cut into.

A source is opened by its name alone, and its rows are found at the first access: prepared data is
not read again. jsonl is read line by line; importing `datasets`, which
reads other files, takes a second, so readers/ is imported when a recipe names one. Whatever reads
them, the rows of each split are one sequence, and the ranges that a recipe names are cut from it
here.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from ..base.checksums import cached_file_digest, digest
from ..base.errors import DataError, RecipeError, did_you_mean
from ..base.limits import parse_json
from ..base.types import Range, Row, Rows, Slice
from ..recipe.tables import DATA_FILES, Data, Source
from .jsonl import JoinedRows, RowList, ensure_keys_once, find_lines
from .render import lead_row

SLICE_BYTES = 4_000_000
"""Size of a slice: small enough to balance workers and to fit in memory."""
SLICE_ROWS = 10_000
"""Maximum number of rows in a slice."""
COLUMN_ROWS = 1_000
"""Number of rows of each source that are read at a time to find columns."""
FIRST_ROWS = 100
"""Number of rows at the beginning of a source; one of them decides how all rows are read."""
ROWS_NOT_HELD_OUT = (
    "evaluations read rows that are trained on, too: eval.split and the split in [data] overlap. "
    'Hold rows out, as split = "train[95%:]" and split = "train[:95%]" do'
)


@dataclass(eq=False)
class OpenSource(JoinedRows):
    """The rows that a recipe takes from a source: ranges of its splits."""

    source: Source
    where: str
    """The recipe's key and the name, for messages."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """A checksum of the source's content, its split, and how its rows are read."""
        path = Path(self.source.source)
        if path.is_file():
            content = cached_file_digest(path)
        else:
            files = [file for file in sorted(path.rglob("*")) if file.is_file()]
            checksums = {str(file.relative_to(path)): cached_file_digest(file) for file in files}
            content = digest(
                checksums or {split: rows.fingerprint for split, rows in self.splits.items()}
            )
        own = self.source.model_dump(include={"columns", "train_on"}, exclude_defaults=True)
        return {"content": content, "split": self.source.split, **own}

    @cached_property
    def splits(self) -> Mapping[str, Any]:
        """All rows of the source, by split."""
        name, path, split = self.source.source, Path(self.source.source), self.source.split
        if path.is_file() and path.suffix in (".jsonl", ".json"):
            return {"train": _read_json(path, self.where)}
        from .readers.dataset import read_splits

        reader = path.suffix[1:] if path.is_file() else None
        return read_splits(name, reader, f"{self.where} (split '{split}')")

    @property
    def _split_sizes(self) -> dict[str, int]:
        return {name: len(rows) for name, rows in self.splits.items()}

    @cached_property
    def ranges(self) -> list[Range]:
        """The rows that the recipe takes."""
        split, sizes = self.source.split, self._split_sizes
        if split in sizes:
            return [(split, 0, sizes[split])]
        from .readers.dataset import parse_split

        return parse_split(split, sizes, self.where)

    @property
    def facts(self) -> dict[str, Any]:
        """What the record of its tokens says of it."""
        return {"name": self.source.source, "weight": self.source.weight, "rows": self.ranges}

    @cached_property
    def parts(self) -> Sequence[Rows]:  # type: ignore[override]  # found at the first access
        """The ranges of rows."""
        parts = [self.splits[name].part(start, stop) for name, start, stop in self.ranges]
        if not sum(map(len, parts)):
            raise DataError(
                f"{self.where} (split '{self.source.split}'): has no rows; set another split of "
                f"{self._split_sizes}"
            )
        return parts


def open_source(source: Source, key: str = "data.source") -> OpenSource:
    """Open a source by its name: a file, a folder, or a name on the hub.

    `key` is the recipe's key that names it, for messages.
    """
    name, where = source.source, f"{key}: {source.source}"
    _ensure_readable(name, where)
    return OpenSource(source, where)


def _ensure_readable(name: str, where: str) -> None:
    """Refuse what is a path, by its name or on the disk, and holds no data."""
    path, known = Path(name), ", ".join(DATA_FILES)
    if path.is_file():
        if path.suffix not in DATA_FILES:
            raise DataError(f"{where}: unknown file type '{path.suffix}'; use {known}, unpacked")
        if path.stat().st_size == 0:
            raise DataError(f"{where}: the file is empty; name a file with rows")
    elif path.is_dir():
        files = [*path.glob("*"), *path.glob("*/*")]
        if not any({*DATA_FILES} & {*file.suffixes} for file in files):
            # `datasets` would walk through the whole tree.
            raise DataError(
                f"{where}: the folder has no data: no {known} file, and no dataset of "
                "save_to_disk; name another folder, or a file"
            )
    elif path.exists():
        raise DataError(f"{where}: is a pipe or a device, and is read twice; write it to a file")
    elif path.suffix in DATA_FILES or name.startswith((".", "/")):
        names = [file.name for file in path.parent.glob("*") if file.suffix in DATA_FILES]
        raise DataError(f"{where}: no such file{did_you_mean(path.name, names)}")


def _read_json(path: Path, where: str) -> Rows:
    """Read the array or the object of a .json file; others hold a row on each line."""
    if path.suffix == ".jsonl":
        return find_lines(path)
    content = path.read_bytes()
    try:
        rows = parse_json(content)
        ensure_keys_once(content, rows)
    except ValueError as error:
        if content[:100].lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["):
            raise DataError(f"{where}: is not JSON: {error}; correct the file") from error
        return find_lines(path)
    rows = rows if isinstance(rows, list) else [rows]
    return RowList(rows, len(content) // (len(rows) or 1))


def ensure_columns(data: Data, sources: Sequence[OpenSource]) -> None:
    """Refuse configured columns that no row has: of any source, or of the one that names them."""
    for rows in sources:
        if own := rows.source.columns:
            _ensure_columns(data.model_copy(update={"columns": own, "ignore": []}), [rows])
    _ensure_columns(data, sources)


def _ensure_columns(data: Data, sources: Sequence[Rows]) -> None:
    named = [("columns", name, f" (for {ours})") for ours, name in data.columns.items()]
    named += [("ignore", name, "") for name in data.ignore]
    columns, wanted = set[str](), {name for _, name, _ in named}
    starts = range(0, max(map(len, sources), default=0), COLUMN_ROWS)
    for start, source in product(starts, sources):
        if wanted <= columns:
            return
        rows = source.read(start, start + COLUMN_ROWS)
        columns.update(*(row for row in rows if isinstance(row, dict)))
    known = ", ".join(sorted(columns)) or "none"
    missing = [
        f"data.{key}: no row has the column '{name}'{use}; columns: {known}"
        for key, name, use in named
        if name not in columns
    ]
    if missing:
        raise RecipeError(missing)


def read_lead_row(rows: Rows, data: Data) -> Row:
    """Choose one of a source's first rows: all its rows are read as it is."""
    return lead_row(rows.read(0, FIRST_ROWS), data)


def slices_of(sources: Sequence[Rows], settings: Sequence[Data]) -> list[Slice]:
    """Cut sources into slices of about equal size, independent of the machine."""
    slices = []
    for number, (rows, data) in enumerate(zip(sources, settings, strict=True)):
        by_bytes = np.cumsum(rows.sizes()) // SLICE_BYTES
        by_rows = np.arange(len(rows)) // SLICE_ROWS
        lead = read_lead_row(rows, data)
        cuts = np.flatnonzero((np.diff(by_bytes) > 0) | (np.diff(by_rows) > 0)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(rows)]):
            slices.append(Slice(number, start, stop, rows.part(start, stop), lead))
    return slices


def overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell from the facts of two sources whether they have rows in common."""
    return os.path.realpath(one["name"]) == os.path.realpath(other["name"]) and any(
        split == other_split and max(start, other_start) < min(stop, other_stop)
        for split, start, stop in one["rows"]
        for other_split, other_start, other_stop in other["rows"]
    )
