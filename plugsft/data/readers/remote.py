"""Rows at s3://, gs://, hf:// and https:// addresses, read by ranges, never copied whole."""

import fnmatch
import io
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...base.checksums import digest
from ...base.errors import DataError
from ...base.types import Ints, Row, Rows
from ...recipe.tables import Source
from ..jsonl import JsonLines, find_lines, without_none

T = TypeVar("T")
ENDINGS = (".jsonl", ".parquet")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Scheme -> the extra of plugsft that reads it."""
VERSIONS = ("etag", "last-modified", "lastmodified", "mtime", "updated", "md5hash", "blob_id")
"""What an object store says of an object's content, in small letters."""
TRIES, TIMEOUT = 5, 60
SCAN = 8 << 20
"""Bytes of a request while lines are searched."""
FIRST_SCAN = 1 << 18
"""Bytes of an object in which the first lines are searched."""
EXACT = 1 << 14
"""Bytes of the smallest request elsewhere."""


@dataclass(frozen=True)
class Address:
    """An object, opened like a path."""

    url: str
    size: int
    buffer: int = EXACT

    def open(self, _mode: str = "rb") -> io.BufferedReader:
        """Open the object; each read asks for its own bytes only."""
        return io.BufferedReader(RangeFile(self), self.buffer)

    def fetch(self, start: int, stop: int) -> bytes:
        """Read a range of bytes; a cut connection is tried again."""
        return _retried(lambda: self._fetch(start, stop), self.url)

    def _fetch(self, start: int, stop: int) -> bytes:
        if self.url.startswith("http"):
            request = urllib.request.Request(
                self.url, headers={"Range": f"bytes={start}-{stop - 1}"}
            )
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                length = int(response.headers.get("Content-Length", -1))
                if response.status != 206 and length != stop - start:
                    raise DataError(
                        f"{self.url}: the server gives whole files only (no Range requests): "
                        "download the file, and name it"
                    )
                content = response.read()
        else:
            store, path = _store(self.url)
            content = store.cat_file(path, start=start, end=stop)
        if len(content) != stop - start:
            raise ConnectionError(f"{len(content):,} bytes of {stop - start:,} arrived")
        return bytes(content)


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

    def tell(self) -> int:
        """Return the position."""
        return self._position

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

    def blocks(self) -> Iterator[tuple[pa.RecordBatch, str, None]]:
        """Yield record batches; they have no file in which their tokens can stay."""
        for number, (first, last) in enumerate(pairwise(_groups(self.address))):
            begin, end = max(self.start, first), min(self.stop, last)
            if begin < end:
                table = _read_group(self.address, number).slice(begin - first, end - begin)
                for batch in table.to_batches():
                    yield batch, "", None

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows; a field that is null counts as missing."""
        blocks = self.part(start, stop).blocks()
        return [without_none(row) for batch, *_ in blocks for row in batch.to_pylist()]

    def sizes(self) -> Ints:
        """Return the average size of a row in bytes, for each row."""
        return np.full(len(self), self.size)


@dataclass(frozen=True)
class JoinedRows:
    """Rows of several objects."""

    parts: tuple[Any, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def part(self, start: int, stop: int) -> Rows:
        """Return a range of the rows: of one object, where it lies in one."""
        cut, offset = [], 0
        for rows in self.parts:
            begin, end = max(start - offset, 0), min(stop - offset, len(rows))
            if begin < end:
                cut.append(rows.part(begin, end))
            offset += len(rows)
        return cut[0] if len(cut) == 1 else JoinedRows(tuple(cut))

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows, or None for a row that is not a JSON object."""
        rows = self.part(start, stop)
        parts = rows.parts if isinstance(rows, JoinedRows) else (rows,)
        return [row for part in parts for row in part.read(0, len(part))]

    def sizes(self) -> Ints:
        """Return the size of each row in bytes, approximately."""
        return np.concatenate([np.zeros(0, np.int64), *(rows.sizes() for rows in self.parts)])


class RemoteSource:
    """The rows of one object, of a folder or of a pattern."""

    def __init__(self, source: Source, where: str) -> None:
        self._split, self._where = source.split, where
        self._objects = _explained(lambda: _find(source.source), where)
        if not self._objects:
            raise DataError(f"{where}: no object; use names that end with {' or '.join(ENDINGS)}")

    @cached_property
    def identity(self) -> dict[str, str]:
        """The sizes and versions of the objects."""
        versions = [version for _, version in self._objects]
        return {"objects": digest({"versions": versions}), "split": self._split}

    @cached_property
    def _rows(self) -> JoinedRows:
        rows = _explained(lambda: JoinedRows(tuple(map(self._open, self._objects))), self._where)
        if self._split != "train":
            from .dataset import parse_split

            try:
                ranges = parse_split(self._split, {"train": len(rows)})
            except Exception as error:  # datasets raises nearly every type
                raise DataError(
                    f"{self._where}: split '{self._split}' is not understood; an address is one "
                    f"split, 'train'; write its slices as train[:100] or train[-5%:] ({error})"
                ) from error
            rows = JoinedRows(tuple(rows.part(each.start, each.stop) for _, each in ranges))
        if not len(rows):
            raise DataError(f"{self._where} (split '{self._split}'): has no rows")
        return rows

    def _open(self, item: tuple[Address, Any]) -> JsonLines | ParquetRows:
        address = item[0]
        if PurePosixPath(urlsplit(address.url).path).suffix == ".parquet":
            count = _groups(address)[-1]
            return ParquetRows(address, 0, count, address.size // max(1, count))
        wanted, size = re.fullmatch(r"train\[:(\d+)\]", self._split), FIRST_SCAN
        if wanted is None:
            size = address.size
        while True:
            # The beginning of the object is enough if it has more lines than are wanted.
            beginning = Address(address.url, min(size, address.size), min(size, SCAN))
            lines: Any = find_lines(beginning)  # type: ignore[arg-type]
            if wanted is None or size >= address.size or len(lines) > int(wanted[1]):
                return JsonLines(address, lines.starts, lines.stops)  # type: ignore[arg-type]
            size *= 4

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, start: int, stop: int) -> Rows:
        """Return a range of the rows."""
        return self._rows.part(start, stop)

    def read(self, start: int, stop: int) -> list[Row | None]:
        """Return rows, or None for a row that is not a JSON object."""
        return _explained(lambda: self._rows.read(start, stop), self._where)

    def sizes(self) -> Ints:
        """Return the size of each row in bytes, approximately."""
        return self._rows.sizes()


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


def _find(url: str) -> list[tuple[Address, Any]]:
    """Return the objects of an address, a folder or a pattern, with size and version."""
    if url.startswith("http"):
        return [_head(url)]
    store, path = _store(url)
    if any(letter in path for letter in "*?["):
        folder = path[: min(path.index(letter) for letter in "*?[" if letter in path)]
        infos = store.find(folder.rpartition("/")[0], detail=True)
        infos = {name: info for name, info in infos.items() if fnmatch.fnmatch(name, path)}
    elif path.endswith(ENDINGS):
        infos = {path: store.info(path)}
    else:
        infos = store.find(path, detail=True)
        if not infos:
            store.info(path)  # says that it is missing
    names = sorted(name for name in infos if name.endswith(ENDINGS))
    found = []
    for name in names:
        facts = {key.lower(): str(value) for key, value in infos[name].items()}
        version = {key: facts[key] for key in ("size", *VERSIONS) if key in facts}
        found.append((Address(store.unstrip_protocol(name), int(infos[name]["size"])), version))
    return found


def _head(url: str) -> tuple[Address, Any]:
    """Ask a web server for size and version of a file."""

    def ask() -> dict[str, str]:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return {name.lower(): value for name, value in response.headers.items()}

    headers = _retried(ask, url)
    if "content-length" not in headers:
        raise DataError(f"{url}: the server does not tell its size: download it, and name the file")
    version = {key: headers[key] for key in ("content-length", *VERSIONS) if key in headers}
    return Address(url, int(headers["content-length"])), version


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


def _explained(work: Callable[[], T], where: str) -> T:
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
            text = f"no access ({text}); set the store's credentials: AWS_ACCESS_KEY_ID and others"
        elif isinstance(error, ValueError) and "rotocol" in text:
            text = f"unknown scheme ({text}); use s3, gs, hf or https"
        raise DataError(f"{where}: {text}") from error
