"""Objects at s3://, gs://, hf:// and https:// addresses: found, and read by ranges of bytes."""

import fnmatch
import io
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec

from ...base.errors import DataError

T = TypeVar("T")
ENDINGS = (".jsonl", ".parquet")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Scheme -> the extra of plugsft that reads it."""
VERSIONS = ("etag", "last-modified", "lastmodified", "mtime", "updated", "md5hash", "blob_id")
"""What an object store says of an object's content, in small letters."""
TRIES, TIMEOUT = 5, 60
EXACT = 1 << 14
"""Bytes of the smallest request, but while lines are searched."""


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


def find_objects(url: str) -> list[tuple[Address, Any]]:
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
    objects = []
    for name in sorted(name for name in infos if name.endswith(ENDINGS)):
        facts = {key.lower(): str(value) for key, value in infos[name].items()}
        version = {key: facts[key] for key in ("size", *VERSIONS) if key in facts}
        objects.append((Address(store.unstrip_protocol(name), int(infos[name]["size"])), version))
    return objects


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
            text = f"no access ({text}); set the store's credentials: AWS_ACCESS_KEY_ID and others"
        elif isinstance(error, ValueError) and "rotocol" in text:
            text = f"unknown scheme ({text}); use s3, gs, hf or https"
        raise DataError(f"{where}: {text}") from error
