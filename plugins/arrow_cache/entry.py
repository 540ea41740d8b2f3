"""One entry of the cache: open it, or build it in one of all processes."""

import fcntl
import json
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugsft import DataError, DiskError, damage, reason_of, say


@dataclass(frozen=True)
class Entry:
    """An entry of the cache, which may not exist yet."""

    folder: Path
    key: dict[str, Any]
    """All that its tokens depend on."""
    read: Callable[..., Any]
    read_only: bool

    def ensure(self, build: Callable[..., bool]) -> str:
        """Build the entry if it cannot be used; describe the build, or return "" for a hit."""
        exists = os.path.exists(self.folder)
        fault = self.find_fault(self.folder) if exists else "the entry does not exist"
        if not fault:
            return ""
        if self.read_only:
            raise DiskError(f"{self.folder}: {fault}", "")
        if exists:
            say(f"cache: rebuilding {self.folder}: {fault}")
        started = time.perf_counter()
        if not build(self.folder, lambda folder: not self.find_fault(folder)):
            return "miss: built by another process"
        return f"miss: built in {time.perf_counter() - started:.1f} s"

    def open(self, in_memory: bool) -> Any:
        """Open the entry, and lock it: `cache gc` does not remove a locked entry."""
        manifest = self.folder / "manifest.json"
        if not self.read_only:
            with suppress(OSError):
                os.utime(manifest)  # the time of the last use
        artefact = self.read(self.folder, in_memory)
        with suppress(OSError):  # a file system without locks
            lock = os.open(manifest, os.O_RDONLY)
            weakref.finalize(artefact, os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return artefact

    def find_fault(self, folder: Path) -> str | None:
        """Return why an entry cannot be used, or None; checks only the sizes of its files."""
        if fault := damage(folder, quick=True):
            return fault
        try:
            stored_key = self.read(folder, False).facts["key_parts"]
        except (DataError, LookupError, OSError, ValueError) as error:
            return reason_of(error)
        if stored_key != json.loads(json.dumps(self.key)):
            return "it was built for another key"
        return None
