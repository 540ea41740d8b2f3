"""One entry of the cache: open it, or build it in one of all processes."""

import fcntl
import functools
import json
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from plugsft import DataError, DiskError, damage, once, reason_of, say

BUILT = "built.json"
"""File of an entry: the run that built it, and how long that took."""
ABSENT = "the entry does not exist"


@dataclass(frozen=True)
class Entry:
    """An entry of the cache, which may not exist yet."""

    folder: Path
    key: dict[str, Any]
    """All that its tokens depend on."""
    read: Callable[..., Any]
    refresh: bool
    """Rebuild it, unless this launch has built it."""
    read_only: bool

    def ensure(self, build: Callable[[Path], None], share: Callable[..., None] | None) -> str:
        """Build the entry if it cannot be used; describe the build, or return "" for a hit."""
        exists = os.path.exists(self.folder)
        fault = self.find_fault(self.folder) if exists else ABSENT
        if not fault:
            return ""
        if self.read_only:
            raise DiskError(f"{self.folder}: {fault}", "")
        if exists:
            say(f"cache: rebuilding {self.folder}: {fault}")
        started, seconds = time.perf_counter(), list[float]()

        def build_and_record(folder: Path) -> None:
            build(folder)
            seconds.append(round(time.perf_counter() - started, 1))
            (folder / BUILT).write_text(json.dumps({"launch": launch_id(), "seconds": seconds[0]}))

        say_once = functools.cache(lambda: say("waiting for another process to prepare the data"))
        once(self.folder, build_and_record, say_once, lambda it: not self.find_fault(it), share)
        return f"miss: built in {seconds[0]} s" if seconds else "miss: built by another process"

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
            built = json.loads((folder / BUILT).read_text()) if self.refresh else {}
        except (DataError, LookupError, OSError, ValueError) as error:
            return reason_of(error)
        if stored_key != json.loads(json.dumps(self.key)):
            return "it was built for another key"
        return "refresh = true" if self.refresh and built["launch"] != launch_id() else None


def launch_id() -> str:
    """Return an identifier of this launch, which all its ranks share."""
    process = psutil.Process()
    if "RANK" in os.environ:
        process = process.parent() or process
    return f"{process.pid} {process.create_time()} {os.environ.get('MASTER_PORT')}"
