"""Rows through `datasets`: parquet, Arrow, saved datasets, and names on the hub."""

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.compute as pc
from huggingface_hub import metadata_load
from pandas.errors import ParserWarning

from ...base.console import say
from ...base.errors import DataError, reason_of
from ...base.limits import parse_json, path_inside, read_json_object
from ...base.types import Ints, Range, Row
from ...recipe.tables import DATA_FILES

NUMBER = r"^(-?(0|[1-9]\d{0,17})(\.\d{1,17})?([eE][+-]?\d{1,3})?|[Tt]rue|[Ff]alse|TRUE|FALSE)?$"
"""What a column of numbers, or of truth values, holds in a csv."""


class DatasetRows:
    """A split of a dataset of `datasets`, or a range of it."""

    def __init__(self, data: Any, numbers: Collection[str] = ()) -> None:
        self._data, self._numbers = data, numbers
        """The columns of a csv that hold numbers alone; it is read as text."""

    def __len__(self) -> int:
        return len(self._data)

    def part(self, start: int, stop: int) -> "DatasetRows":
        """Cut a range of the rows; another process maps the same files."""
        return DatasetRows(self._data.select(range(start, stop)), self._numbers)

    def read(self, start: int, stop: int) -> list[Row | str]:
        """Read rows; a field that Arrow filled in with None counts as missing."""
        table = self._valid(self._data.with_format("arrow")[start:stop], True)
        clean = cleaned(pa.struct([*table.schema]))
        try:
            rows = [*map(clean, table.to_pylist())]
        except ValueError as error:
            raise self._damaged(error) from error
        for row in rows if self._numbers else ():
            row |= {name: json.loads(row[name].lower()) for name in self._numbers if name in row}
        return rows

    def sizes(self) -> Ints:
        """Count each row as the average one."""
        data = self._valid(self._data.data, False)
        return np.full(len(self), data.nbytes // max(1, len(self)))

    @property
    def fingerprint(self) -> str:
        """The name that `datasets` gives to the content."""
        return str(self._data._fingerprint)

    def _valid(self, table: Any, full: bool) -> Any:
        """Validate a table before it is read: a wrong offset would end the process."""
        try:
            table.validate(full=full)
        except pa.ArrowException as error:
            raise self._damaged(error) from error
        return table

    def _damaged(self, error: Exception) -> DataError:
        files = ", ".join(file["filename"] for file in self._data.cache_files)
        return DataError(f"{files}: its rows are damaged ({reason_of(error)}); write it again")


def cleaned(kind: pa.DataType) -> Callable[[Any], Any]:
    """Make what drops the fields that Arrow filled in with None, and parses texts of JSON.

    `datasets` writes values that differ in shape as such texts: turns, if some call tools.
    """
    if isinstance(kind, pa.JsonType):
        return parse_json
    if pa.types.is_struct(kind):
        fields = {field.name: cleaned(field.type) for field in kind}
        return lambda value: {
            name: fields[name](inner) for name, inner in value.items() if inner is not None
        }
    # A list of ids may have thousands.
    clean = cleaned(kind.value_type) if hasattr(kind, "value_type") else as_it_is
    if clean is as_it_is:
        return as_it_is
    return lambda values: [value if value is None else clean(value) for value in values]


def as_it_is(value: Any) -> Any:
    """Return a value."""
    return value


def read_splits(name: str, reader: str | None, where: str) -> dict[str, DatasetRows]:
    """Open a file with a reader of `datasets`, a saved dataset, a folder, or a name on the hub."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our messages say enough
    path = Path(name)
    ensure_inside(path, where)
    is_csv = reader == "csv" or {file.suffix for file in data_files(path)} == {".csv"}
    options: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)  # fields that would be lost
            if is_csv:
                options = as_texts(path)
            if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
                loaded: Any = datasets.load_from_disk(name)
            elif reader:
                loaded = datasets.load_dataset(reader, data_files=name, **options)
            else:
                # A subset: "owner/name:subset".
                repository, _, subset = (name, "", "") if path.exists() else name.partition(":")
                warn_of_unread(path, where)
                loaded = datasets.load_dataset(repository, subset or None, **options)
    except Exception as error:  # datasets and its readers raise nearly every type
        cause = error.__cause__ or error  # datasets wraps those of its readers
        first_line = str(cause).strip().replace("\nPlease", " Please").partition("\n")[0]
        if isinstance(cause, ParserWarning):
            first_line = "a row has more fields than the first line has names"
        action = f"read as {reader}" if reader else "opened as a file, a folder or a hub name"
        raise DataError(
            f"{where}: cannot be {action}: {type(cause).__name__}: {first_line}; correct the name "
            "(owner/name:subset for a subset), or write the file again"
        ) from error
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    return {
        split: DatasetRows(data, columns_of_numbers(data) if is_csv else ())
        for split, data in splits.items()
    }


def as_texts(path: Path) -> dict[str, Any]:
    """Return the options by which `datasets` reads a csv, or those of a folder, as texts.

    Else pandas takes "007" for a number, "NA" for nothing, and the first column for an index where
    rows have a field too many.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.csv"))
    names = [[*pandas.read_csv(file, nrows=0, index_col=False).columns] for file in files]
    for file, others in zip(files, names, strict=True):
        if sorted(others) != sorted(names[0]):
            raise ValueError(f"{file} has other columns than {files[0]}")
    texts = datasets.Features(dict.fromkeys(names[0], datasets.Value("string")))
    empty = {"keep_default_na": False, "na_values": [""]}
    return {"index_col": False, "features": texts, **empty}


def columns_of_numbers(data: Any) -> list[str]:
    """Name the columns of texts that hold numbers alone."""
    return [
        name
        for name in data.column_names
        if pc.all(pc.match_substring_regex(data.data.column(name), NUMBER)).as_py()
    ]


def warn_of_unread(folder: Path, where: str) -> None:
    """Name the data files of a folder that `datasets` leaves out, unless its README.md does."""
    card = folder / "README.md"
    if not folder.is_dir() or (card.is_file() and "configs" in (metadata_load(card) or {})):
        return
    read = datasets.load_dataset_builder(str(folder)).config.data_files or {}
    names = {str(name) for files in read.values() for name in files}
    unread = [file for file in data_files(folder) if not names & {str(file), str(file.resolve())}]
    if unread:
        say(
            f"warning: {where}: not read: {', '.join(file.name for file in unread)}. Of a folder, "
            "`datasets` reads files of one kind, and only those with train or test in their names, "
            "if there are any; name the others as sources of their own"
        )


def data_files(folder: Path) -> Iterator[Path]:
    """Yield the data files in a folder."""
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        known = file.suffix in DATA_FILES and file.name not in ("state.json", "dataset_info.json")
        if known and not hidden:
            yield file


def ensure_inside(folder: Path, where: str) -> None:
    """Refuse a folder that leads out of itself: somebody else may have made it.

    Files of the hub's cache are links to its blobs.
    """
    if not folder.is_dir():
        return
    home = folder.resolve()
    allowed = (home, home.parent.parent / "blobs")
    for path in folder.rglob("*"):
        target = path.resolve()
        if path.is_symlink() and not any(map(target.is_relative_to, allowed)):
            raise DataError(f"{where}: {path} leads out of the folder; put the file in its place")
    try:
        card = folder / "README.md"
        metadata = metadata_load(card) if card.is_file() else None
        configs = (metadata or {}).get("configs")
        states = [read_json_object(state) for state in folder.rglob("state.json")]
        for name in strings([configs, [state.get("_data_files") for state in states]]):
            if "://" in name:
                raise ValueError(f"it names {name}, outside of its folder")
            path_inside(folder, name)
    except ValueError as error:
        raise DataError(
            f"{where}: {reason_of(error)}; correct its README.md or state.json, or name a file"
        ) from error


def strings(value: Any) -> Iterator[str]:
    """Yield the strings in lists and dictionaries."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value or ():
        if not isinstance(value, str):
            yield from strings(inner)


def parse_split(split: str, sizes: Mapping[str, int], where: str) -> list[Range]:
    """Parse a split in the notation of `datasets`."""
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except Exception as error:  # datasets raises nearly every type
        splits = f"splits: {', '.join(sizes)}"
        if [*sizes] == ["train"]:
            splits = "a file is one split, 'train'"
        raise DataError(
            f"{where}: split '{split}' is not understood; {splits}; write its slices as "
            f"train[:100] or train[-5%:] ({reason_of(error)})"
        ) from error
    asked = max(map(int, re.findall(r"[\[:](\d+)(?=[\]:])", split)), default=0)
    if asked > max(sizes[part.splitname] for part in parts):
        say(f"warning: {where}: split '{split}' asks for more rows than there are")
    return [(part.splitname, part.from_, max(part.from_, part.to)) for part in parts]
