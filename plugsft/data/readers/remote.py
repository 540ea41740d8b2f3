"""Rows at s3://, gs://, hf:// and https:// addresses, read by ranges, never copied whole."""

import io
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from glob import has_magic
from itertools import pairwise
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...base.checksums import digest
from ...base.errors import DataError
from ...base.types import Ints, Row
from ...recipe.tables import Source
from ..jsonl import JoinedRows, JsonLines, LateRows, ensure_rows, find_lines, without_none

T = TypeVar("T")
ENDINGS = (".jsonl", ".parquet")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Scheme -> the extra of plugsft that reads it."""
VERSIONS = ("etag", "last-modified", "lastmodified", "mtime", "updated", "md5hash", "blob_id")
"""What an object store says of an object's content, in small letters."""
TRIES, TIMEOUT = 5, 60
UNQUOTED = "%/:=&?~#+!$,;'@()*[]"
"""Letters of an address that have a meaning, or are quoted already."""
EMPTY_RANGE = 416
"""A server's answer to a request for bytes of an empty file."""
GZIP = b"\x1f\x8b"
"""The first bytes of a compressed file."""
COMPRESSED = "is compressed by gzip, which has no ranges of rows: store it as it is, or download it"
EXACT = 1 << 14
"""Bytes of the smallest request, but while lines are searched."""
SCAN = 8 << 20
"""Bytes of a request while lines are searched."""
FIRST_SCAN = 1 << 18
"""Bytes of an object in which the first lines are searched."""


Version = tuple[tuple[str, str], ...]
"""What a store says of an object's content: name and value."""


@dataclass(frozen=True)
class Address:
    """An object, opened like a path."""

    url: str
    size: int
    version: Version = ()
    buffer: int = EXACT

    def open(self, _mode: str = "rb", buffering: int = EXACT) -> io.BufferedReader:
        """Open the object; each read asks for its own bytes only."""
        return io.BufferedReader(RangeFile(self), max(buffering, self.buffer))

    def fetch(self, start: int, stop: int) -> bytes:
        """Read a range of bytes; a cut connection is tried again."""
        where = f"data: {self.url}"
        content = explained(lambda: _retried(lambda: self._fetch(start, stop), self.url), where)
        if start == 0 and content.startswith(GZIP):
            raise DataError(f"{self.url}: {COMPRESSED}")
        return content

    def _fetch(self, start: int, stop: int) -> bytes:
        if self.url.startswith("http"):
            content, version = _get(self.url, start, stop)
        else:
            store, path = _store(self.url)
            content = store.cat_file(path, start=start, end=stop)
            # Asked after the bytes arrived, which may be of an older version, not of a newer one.
            version = _version(store.info(path))
        self._ensure_unchanged(version)
        if len(content) != stop - start:
            raise ConnectionError(f"{len(content):,} bytes of {stop - start:,} arrived")
        return bytes(content)

    def _ensure_unchanged(self, version: Version) -> None:
        """Refuse bytes of a replaced object: they do not fit to the lines that were found."""
        before, now = dict(self.version), dict(version)
        # A listing may write times in another way: the first name that both know is compared.
        names = [name for name in VERSIONS if name in before and name in now][:1]
        if any(before.get(name) != now.get(name) for name in ("size", *names) if before):
            raise DataError(f"{self.url}: has changed while it was read; start again")


class RangeFile(io.RawIOBase):
    """The bytes of an object, as a file."""

    def __init__(self, address: Address) -> None:
        self._address, self._position = address, 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it can be read from anywhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._address.size}
        self._position = base[whence] + offset
        return self._position

    def readinto(self, target: Any) -> int:
        """Fill a buffer with one request."""
        stop = min(self._position + len(target), self._address.size)
        if stop <= self._position:
            return 0
        content = self._address.fetch(self._position, stop)
        target[: len(content)] = content
        self._position = stop
        return len(content)


def find_objects(url: str) -> list[Address]:
    """Return the objects of an address, a folder or a pattern."""
    if url.startswith("http"):
        if not path_of(url).endswith(ENDINGS):
            return []
        _, version = _retried(lambda: _get(url, 0, 1), url)
        return [Address(url, int(dict(version)["size"]), version)]
    store, path = _store(url)
    if has_magic(path) and not store.exists(path):  # a name may hold these letters itself
        infos = store.glob(path, detail=True)
    elif path.endswith(ENDINGS):
        infos = {path: store.info(path)}
    else:
        infos = store.find(path, detail=True) or {path: store.info(path)}  # says if it is missing
    names = sorted(name for name in infos if name.endswith(ENDINGS))
    return [
        Address(store.unstrip_protocol(name), int(infos[name]["size"]), _version(infos[name]))
        for name in names
    ]


def _version(info: Mapping[str, Any]) -> Version:
    """Return what a store says of an object's content."""
    facts = {key.lower(): str(value) for key, value in info.items()}
    return tuple((key, facts[key]) for key in ("size", *VERSIONS) if key in facts)


def path_of(url: str) -> str:
    """Return the path of an address, without the query of a web address."""
    return urlsplit(url).path if url.startswith("http") else url


def _get(url: str, start: int, stop: int) -> tuple[bytes, Version]:
    """Ask a web server for a range of bytes; return them and the file's version.

    A request for the headers alone would be refused by an address that is signed for reading.
    """
    headers = {"Range": f"bytes={start}-{stop - 1}"}
    request = urllib.request.Request(quote(url, safe=UNQUOTED), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            facts, status = dict(response.headers.items()), response.status
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise DataError(f"{url}: {COMPRESSED}")
            size = response.headers.get("Content-Length", "")
            if status != 206 and size not in ("0", str(stop - start)):
                raise DataError(
                    f"{url}: the server gives whole files only (no Range requests): download the "
                    "file, and name it"
                )
            if status == 206:
                size = response.headers.get("Content-Range", "").rpartition("/")[2]
            content = response.read(stop - start + 1)
    except urllib.error.HTTPError as error:
        if error.code != EMPTY_RANGE or start:
            raise
        facts, size, content = {}, "0", b""
    if not size.isdigit():
        raise DataError(f"{url}: the server does not tell its size: download it, and name the file")
    return content, _version(facts | {"size": size})


def _store(url: str) -> tuple[Any, str]:
    store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return store, str(path)


def _retried(read: Callable[[], T], url: str) -> T:
    """Try again what a cut connection or a busy server has stopped."""
    for attempt in range(TRIES):
        try:
            return read()
        except (FileNotFoundError, PermissionError):
            raise
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 and error.code not in (408, 429):
                raise
            last: Exception = error
        except (OSError, TimeoutError) as error:
            last = error
        except Exception as error:  # each store has types of its own
            if not re.search("Connection|Incomplete|Timeout|ResponseStream", type(error).__name__):
                raise
            last = error
        if attempt < TRIES - 1:
            time.sleep(0.2 * 2**attempt)
    raise DataError(f"{url}: cannot be read after {TRIES} tries: {last}") from last


def explained(work: Callable[[], T], where: str) -> T:
    """Turn the errors of stores into one line with the cure."""
    scheme = where.rpartition(": ")[2].partition("://")[0]
    try:
        return work()
    except DataError:
        raise
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        cure = f"pip install plugsft[{extra}]" if extra else str(error)
        raise DataError(f"{where}: its store needs another package: {cure}") from error
    except Exception as error:  # each store has types of its own
        name, text = type(error).__name__, " ".join(str(error).split()) or "no reason given"
        code = getattr(error, "code", None)
        if isinstance(error, FileNotFoundError) or code == 404:
            text = f"no such bucket, folder or object ({text})"
        elif isinstance(error, PermissionError) or "Credential" in name or code in (401, 403):
            cure = "set the store's credentials: AWS_ACCESS_KEY_ID and others"
            if scheme in ("http", "https"):
                cure = "use a signed address, or download the file"
            text = f"no access ({text}); {cure}"
        elif isinstance(error, ValueError) and "rotocol" in text:
            text = f"unknown scheme ({text}); use s3, gs, hf or https"
        raise DataError(f"{where}: {text}") from error


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
        """Return a range of the rows."""
        stop = min(self.start + stop, self.stop)
        return ParquetRows(self.address, self.start + start, stop, self.size)

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; a field that is null counts as missing."""
        start, stop = self.start + start, min(self.start + stop, self.stop)
        rows: list[Row] = []
        for number, (first, last) in enumerate(pairwise(_groups(self.address))):
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                group = _read_group(self.address, number)
                rows += group.slice(begin - first, end - begin).to_pylist()
        return [without_none(row) for row in rows]

    def sizes(self) -> Ints:
        """Return the average size of a row in bytes, for each row."""
        return np.full(len(self), self.size)


class RemoteSource(LateRows):
    """The rows of one object, of a folder or of a pattern."""

    def __init__(self, source: Source, where: str) -> None:
        self._split, self._where = source.split, where
        self._objects = explained(lambda: find_objects(source.source), where)
        if not self._objects:
            raise DataError(f"{where}: no object; use names that end with {' or '.join(ENDINGS)}")
        self._objects = [address for address in self._objects if address.size]
        if not self._objects:
            raise DataError(f"{where}: is empty; name an object with rows")

    @cached_property
    def identity(self) -> dict[str, str]:
        """The sizes and versions of the objects."""
        versions = [dict(address.version) for address in self._objects]
        return {"objects": digest({"versions": versions}), "split": self._split}

    @cached_property
    def _rows(self) -> JoinedRows:
        rows = explained(lambda: JoinedRows(tuple(map(self._open, self._objects))), self._where)
        if self._split != "train":
            from .dataset import take_split

            rows = take_split(rows, self._split, self._where)
        return ensure_rows(rows, self._where, self._split)

    def _open(self, address: Address) -> JsonLines | ParquetRows:
        if path_of(address.url).endswith(".parquet"):
            count = _groups(address)[-1]
            return ParquetRows(address, 0, count, address.size // max(1, count))
        first = re.fullmatch(r"train\[:(\d+)\]", self._split)
        limit, size = (int(first[1]), FIRST_SCAN) if first else (0, address.size)
        while True:
            # The beginning of the object is enough if it has more lines than the limit.
            beginning = replace(address, size=min(size, address.size), buffer=min(size, SCAN))
            lines: Any = find_lines(beginning)  # type: ignore[arg-type]
            if size >= address.size or len(lines) > limit:
                return JsonLines(address, lines.starts, lines.stops)  # type: ignore[arg-type]
            size *= 4


@lru_cache(maxsize=16)
def _groups(address: Address) -> list[int]:
    """Return where the row groups of a parquet object begin, and where the last one ends."""
    with address.open() as file:
        facts = pq.read_metadata(file)
    sizes = [facts.row_group(number).num_rows for number in range(facts.num_row_groups)]
    return [0, *np.cumsum(sizes).tolist()]


@lru_cache(maxsize=2)
def _read_group(address: Address, number: int) -> pa.Table:
    """Read a row group; slices that follow each other lie in the same one."""
    with address.open() as file:
        return pq.ParquetFile(file).read_row_group(number)
