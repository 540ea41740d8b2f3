"""Rows at s3://, gs:// and hf:// addresses, read by ranges, never copied whole.

fsspec reads the stores. Files of web servers are refused: fsspec gives wrong bytes without an error
where a server ignores ranges, tries nothing again, and does not see that a file has changed.
"""

import io
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from glob import has_magic
from itertools import pairwise
from typing import Any, TypeVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.spec import AbstractBufferedFile

from ...base.errors import DataError
from ...base.types import Ints, Row, Rows
from ..jsonl import JoinedRows, find_lines, without_none

T = TypeVar("T")
ENDINGS = (".jsonl", ".parquet")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Scheme -> the extra of plugsft that reads it."""
SCHEMES = (*EXTRAS, "hf", "file")
"""Stores that are asked. Others, and chains (zip://a::http://b), would ask any server."""
VERSIONS = ("etag", "last-modified", "lastmodified", "mtime", "updated", "md5hash", "blob_id")
"""What an object store says of an object's content, in small letters; the first is taken."""
TRIES = 5
PASSING = re.compile("Connection|Disconnect|Incomplete|ResponseStream|SSL|Timeout")
"""In the names of errors that may pass: each store has types of its own."""
BUSY = (408, 429, 500, 502, 503, 504)
"""A store's answers that may pass."""
GZIP = b"\x1f\x8b"
"""The first bytes of a compressed file."""
COMPRESSED = "is compressed by gzip, which has no ranges of rows: store it as it is, or download it"
EXACT = 1 << 14
"""Bytes of the smallest request."""
FIRST_SCAN = 1 << 18
"""Bytes of an object in which the first lines are searched."""


@dataclass(frozen=True)
class Address:
    """An object, opened like a path."""

    url: str
    size: int
    version: str
    """What the store says of its size and content."""

    def open(self, _mode: str = "rb", buffering: int = EXACT) -> io.BufferedReader:
        """Open the object; each read asks for its own bytes only."""
        return io.BufferedReader(RangeFile(self), max(buffering, EXACT))

    def fetch(self, start: int, stop: int) -> bytes:
        """Read a range of bytes."""
        content = asked(lambda: self._fetch(start, stop), f"data: {self.url}")
        if start == 0 and content.startswith(GZIP):
            raise DataError(f"{self.url}: {COMPRESSED}")
        return content

    def _fetch(self, start: int, stop: int) -> bytes:
        store, path = _store(self.url)
        content = bytes(store.cat_file(path, start=start, end=stop))
        # Asked after the bytes arrived, which may be of an older version, not of a newer one.
        if _version(store.info(path)) != self.version:
            # The bytes do not fit to the lines that were found.
            raise DataError(f"{self.url}: has changed while it was read; start again")
        if len(content) != stop - start:
            raise ConnectionError(f"{len(content):,} bytes of {stop - start:,} arrived")
        return content


class RangeFile(AbstractBufferedFile):  # type: ignore[misc]  # untyped upstream
    """The bytes of an object, as a file."""

    def __init__(self, address: Address) -> None:
        super().__init__(None, address.url, cache_type="none", size=address.size)
        self._address = address

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._address.fetch(start, min(end, self._address.size))


def find_objects(url: str, where: str) -> list[Address]:
    """Find the objects of an address, a folder or a pattern."""
    if url.partition("://")[0] not in SCHEMES or "::" in url:
        raise DataError(
            f"{where}: only addresses of {', '.join(SCHEMES)} are read in place; download the file "
            "(curl -O), and name it"
        )
    found = asked(lambda: _find(url), where)
    if not found:
        raise DataError(f"{where}: no object; use names that end with {' or '.join(ENDINGS)}")
    filled = [address for address in found if address.size]
    if not filled:
        raise DataError(f"{where}: is empty; name an object with rows")
    return filled


def _find(url: str) -> list[Address]:
    store, path = _store(url)
    if has_magic(path) and not store.exists(path):  # a name may hold these letters itself
        infos = store.glob(path, detail=True)
    else:
        infos = store.find(path, detail=True) or {path: store.info(path)}  # says if it is missing
    return [
        Address(store.unstrip_protocol(name), int(info["size"]), _version(info))
        for name, info in sorted(infos.items())
        if name.endswith(ENDINGS)
    ]


def _version(info: Mapping[str, Any]) -> str:
    """Name the size of an object, and what else a store says of its content."""
    facts = {key.lower(): value for key, value in info.items()}
    content = [facts[name] for name in VERSIONS if name in facts]
    return " ".join(map(str, [facts["size"], *content[:1]]))


def _store(url: str) -> tuple[Any, str]:
    store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return store, str(path)


def asked(work: Callable[[], T], where: str) -> T:
    """Ask a store; try again what a cut connection or a busy server has stopped."""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(0.1 * 2**attempt)
        try:
            return work()
        except DataError:
            raise
        except Exception as error:
            busy = getattr(error, "code", None) in BUSY
            if not (busy or PASSING.search(type(error).__name__)):
                raise _refusal(error, where) from error
            last = error
    raise DataError(f"{where}: cannot be read after {TRIES} tries: {last}") from last


def _refusal(error: Exception, where: str) -> DataError:
    """Say why a store refuses, in one line with the cure."""
    scheme, name = where.rpartition(": ")[2].partition("://")[0], type(error).__name__
    text, code = " ".join(str(error).split()) or "no reason given", getattr(error, "code", None)
    if isinstance(error, ImportError):
        cure = f"pip install plugsft[{EXTRAS[scheme]}]" if scheme in EXTRAS else text
        text = f"its store needs another package: {cure}"
    elif isinstance(error, FileNotFoundError) or code == 404:
        text = f"no such bucket, folder or object ({text})"
    elif isinstance(error, PermissionError) or "Credential" in name or code in (401, 403):
        text = f"no access ({text}); set the store's credentials: AWS_ACCESS_KEY_ID and others"
    return DataError(f"{where}: {text}")


@dataclass(frozen=True)
class ParquetRows:
    """Rows of a parquet object, read by row groups."""

    address: Address
    start: int
    stop: int
    size: int
    """Bytes of a row, on average."""

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "ParquetRows":
        """Cut a range of the rows."""
        stop = min(self.start + stop, self.stop)
        return replace(self, start=self.start + start, stop=stop)

    def read(self, start: int, stop: int) -> list[Row | str]:
        """Read rows; a field that is null counts as missing."""
        rows, wanted = list[Row](), self.part(start, stop)
        for number, (first, last) in enumerate(pairwise(_groups(self.address))):
            begin, end = max(wanted.start, first), min(wanted.stop, last)
            if begin < end:
                group = _read_group(self.address, number)
                rows += group.slice(begin - first, end - begin).to_pylist()
        return [without_none(row) for row in rows]

    def sizes(self) -> Ints:
        """Count each row as the average one."""
        return np.full(len(self), self.size)


def read_objects(objects: Sequence[Address], split: str, where: str) -> Rows:
    """Find the rows of objects; of "train[:10]" in no more than the beginning of each."""
    first = re.fullmatch(r"train\[:(\d+)\]", split)
    limit = int(first[1]) if first else None
    return asked(lambda: JoinedRows([_open(each, limit) for each in objects]), where)


def _open(address: Address, limit: int | None) -> Rows:
    if address.url.endswith(".parquet"):
        count = _groups(address)[-1]
        return ParquetRows(address, 0, count, address.size // max(1, count))
    size = address.size if limit is None else FIRST_SCAN
    while True:
        # The beginning of the object is enough if it has more lines than the limit.
        beginning: Any = replace(address, size=min(size, address.size))
        lines = find_lines(beginning)
        if size >= address.size or len(lines) > (limit or 0):
            whole: Any = address
            return replace(lines, path=whole)
        size *= 4


@lru_cache(maxsize=16)
def _groups(address: Address) -> list[int]:
    """Find where the row groups of a parquet object begin, and where the last one ends."""
    with address.open() as file:
        facts = pq.read_metadata(file)
    sizes = [facts.row_group(number).num_rows for number in range(facts.num_row_groups)]
    return [0, *np.cumsum(sizes).tolist()]


@lru_cache(maxsize=2)
def _read_group(address: Address, number: int) -> pa.Table:
    """Read a row group; slices that follow each other lie in the same one."""
    with address.open() as file:
        return pq.ParquetFile(file).read_row_group(number)
