"""Checksums of keys and files; those of large files are cached."""

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from .errors import PlugsftError

MIN_REMEMBERED_SIZE = 1 << 22
"""Bytes of the smallest file whose checksum is cached."""
SETTLED_SECONDS = 2.0
"""A file changed less than this many seconds ago may change again with the same time."""


def digest(key: dict[str, Any]) -> str:
    """Make a short name for a key; the same in every process."""
    return xxhash.xxh3_128(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def add_checksum(facts: dict[str, Any]) -> dict[str, Any]:
    """Add the checksum of facts, for a JSON file."""
    # JSON turns keys into strings and tuples into lists.
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain | {"checksum": digest(plain)}


def parse_checksummed(text: str) -> dict[str, Any]:
    """Parse JSON from `add_checksum`; raise ValueError if the checksum is wrong."""
    facts = json.loads(text)
    if not isinstance(facts, dict) or facts.pop("checksum", None) != digest(facts):
        raise ValueError("its checksum is wrong")
    return facts


def file_digest(path: Path, algorithm: Any = xxhash.xxh3_128) -> str:
    """Make a checksum of a file's bytes; a fast one by default."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def cache_folder() -> Path:
    """Find the folder of the cache, which runs share."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(os.environ.get("PLUGSFT_CACHE") or f"{home}/plugsft")
    if folder.startswith("~"):
        # Some containers have no HOME, and no name for the user.
        folder = f"{tempfile.gettempdir()}/plugsft-{os.getuid()}"
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if os.lstat(folder).st_uid != os.getuid():
            raise PlugsftError(f"{folder}: belongs to another user; set PLUGSFT_CACHE or HOME")
    return Path(folder)


def cached_file_digest(path: Path, algorithm: Any = xxhash.xxh3_128) -> str:
    """Make a file's checksum, or remember it if path, size, time and inode are unchanged."""
    now, stat = time.time(), path.stat()
    if stat.st_size < MIN_REMEMBERED_SIZE:
        return file_digest(path, algorithm)
    identity = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    note = cache_folder() / "files" / digest({algorithm.__name__: identity})
    with suppress(OSError):
        known = note.read_text(errors="replace")
        if len(known) == 2 * algorithm().digest_size:  # else a killed process left it
            return known
    checksum = file_digest(path, algorithm)
    if now - stat.st_mtime > SETTLED_SECONDS:
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.unlink(missing_ok=True)  # it may be a link to a user's file
            note.write_text(checksum)
    return checksum
