"""Checksums: of keys, of files, and of files whose checksum is remembered."""

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
"""Bytes from which remembering is worth a file."""
SETTLED_SECONDS = 2.0
"""Seconds after which a file's time tells one content from the next."""


def digest(key: dict[str, Any]) -> str:
    """Return a short name for a key: equal keys, equal names, in every process."""
    return xxhash.xxh3_128(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def add_checksum(facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts with their checksum, for a JSON file."""
    # As it will be read: in JSON keys are strings, and tuples are lists.
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain | {"checksum": digest(plain)}


def parse_checksummed(text: str) -> dict[str, Any]:
    """Return the facts of such a file; raise ValueError if their checksum is wrong."""
    facts = json.loads(text)
    if not isinstance(facts, dict) or facts.pop("checksum", None) != digest(facts):
        raise ValueError("its checksum is wrong")
    return facts


def file_digest(path: Path) -> str:
    """Return a fast checksum of a file's bytes."""
    checksum = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                checksum.update(chunk)
    except OSError as error:
        raise PlugsftError(f"{path}: cannot be read ({error.strerror})") from error
    return checksum.hexdigest()


def cache_folder() -> Path:
    """Return where plugsft keeps what may be shared between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    place = os.path.expanduser(os.environ.get("PLUGSFT_CACHE") or f"{home}/plugsft")
    if place.startswith("~"):
        # In some containers there is no HOME, and the user has no name.
        place = f"{tempfile.gettempdir()}/plugsft-{os.getuid()}"
    return Path(place)


def cached_file_digest(path: Path) -> str:
    """Return a file's checksum, from memory where its path, size and time are known."""
    now, facts = time.time(), path.stat()
    if facts.st_size < MIN_REMEMBERED_SIZE:
        return file_digest(path)
    identity = [str(path.resolve()), facts.st_size, facts.st_mtime_ns, facts.st_ino]
    note = cache_folder() / "files" / f"{digest({'path': identity[0]})}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(note.read_text())
        if kept["identity"] == identity:
            return str(kept["digest"])
    known = file_digest(path)
    # A file that was written a moment ago may change again within the same tick of its clock.
    if now - facts.st_mtime > SETTLED_SECONDS:
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            half = note.with_suffix(f".{os.getpid()}.tmp")
            half.write_text(json.dumps({"identity": identity, "digest": known}))
            half.replace(note)
    return known
