"""Objects at s3://, gs://, hf:// and https:// addresses: found, and read by ranges of bytes."""

import fnmatch
import io
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import fsspec

from ...base.errors import DataError

T = TypeVar("T")
Version = tuple[tuple[str, str], ...]
"""What a store says of an object's content: name and value."""
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


@dataclass(frozen=True)
class Address:
    """An object, opened like a path."""

    url: str
    size: int
    version: Version = ()
    buffer: int = EXACT

    def open(self, _mode: str = "rb") -> io.BufferedReader:
        """Open the object; each read asks for its own bytes only."""
        return io.BufferedReader(RangeFile(self), self.buffer)

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


def find_objects(url: str) -> list[Address]:
    """Return the objects of an address, a folder or a pattern."""
    if url.startswith("http"):
        if not path_of(url).endswith(ENDINGS):
            return []
        _, version = _retried(lambda: _get(url, 0, 1), url)
        return [Address(url, int(dict(version)["size"]), version)]
    store, path = _store(url)
    # A name may hold these letters itself.
    if any(letter in path for letter in "*?[") and not store.exists(path):
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
