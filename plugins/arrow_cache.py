"""Keep prepared tokens in a folder that all runs share, and open them there in milliseconds."""

import fcntl
import functools
import json
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from plugsft import (
    CacheEntry,
    DataError,
    DiskError,
    Folder,
    Machine,
    RecipeError,
    cache_folder,
    damage,
    digest,
    hookimpl,
    once,
    plugin,
    reason_of,
    say,
    state,
)

BUILT = "built.json"
"""File of an entry: the run that built it, and how long that took."""
ABSENT = "the entry does not exist"


@plugin(provides={"cached_tokens": "folder"})
class ArrowCache:
    """Keep prepared tokens in a folder that all runs share, and open them there in milliseconds.

    The name of an entry is a checksum of everything that its tokens depend on. One process builds
    it while the others wait, and it appears whole or not at all.
    """

    folder: Folder | None = None
    """Folder of the cache. Default: $PLUGSFT_CACHE, or ~/.cache/plugsft if that is not set."""
    refresh: bool = False
    """Rebuild existing entries, once in this run."""
    read_only: bool = False
    """Read the cache, but write nothing there; missing data is prepared in the run's output."""
    in_memory: bool = False
    """Read all tokens at once, for file systems where mapping is slow."""

    results: list[str] = state([])
    """Hit or miss of each entry."""

    @hookimpl
    def check(self, machine: Machine) -> None:
        """Refuse contradicting options."""
        if self.folder and Path(self.folder).is_file():
            raise RecipeError(f"folder: {self.folder} is a file; give a folder")
        if self.refresh and self.read_only:
            raise RecipeError("refresh writes and read_only must not; set one of them")
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", machine.world_size))
        if self.refresh and local_ranks < machine.world_size:
            raise RecipeError(
                "refresh: each machine would rebuild entries that others read; first run "
                "`plugsft prepare RECIPE plugins.arrow_cache.refresh=true`, then launch without"
            )

    @hookimpl
    def cache(
        self, key: dict[str, Any], build: Callable[[Path], None], read: Callable[..., CacheEntry]
    ) -> CacheEntry | None:
        """Open an entry, or build it; if the disk refuses, let the core store the tokens."""
        from plugsft.kit.tokens import opened  # imports Arrow, which reading a recipe never does

        started = time.perf_counter()
        home = Path(self.folder) if self.folder else cache_folder()
        entry = home / "tokens" / digest(key)
        exists = os.path.exists(entry)
        fault = self.find_fault(entry, key, read) if exists else ABSENT
        try:
            if fault and self.read_only:
                raise DiskError(f"{entry}: {fault}", "")
            if fault and exists:
                say(f"cache: rebuilding {entry}: {fault}")
            result = self._build(entry, key, build, read) if fault else "hit"
        except DiskError as error:
            say(f"cache: not used, the run continues without it: {error.reason}")
            self.results.append(f"not used: {error.reason}")
            return None
        if not self.read_only:
            with suppress(OSError):
                os.utime(entry / "manifest.json")  # the time of the last use
        artefact = opened(read, entry, self.in_memory)
        with suppress(OSError):  # a file system without locks
            # `cache gc` does not remove a locked entry.
            lock = os.open(entry / "manifest.json", os.O_RDONLY)
            weakref.finalize(artefact, os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        seconds = time.perf_counter() - started
        self.results.append(
            f"{result}, stored in {entry}"
            if fault
            else f"hit: {entry.name}, opened in {seconds * 1e3:.0f} ms"
        )
        return artefact

    def _build(
        self,
        entry: Path,
        key: dict[str, Any],
        build: Callable[[Path], None],
        read: Callable[..., CacheEntry],
    ) -> str:
        """Build an entry in one of all processes; return a description of the build."""
        seconds: list[float] = []

        def build_and_record(folder: Path) -> None:
            started = time.perf_counter()
            build(folder)
            seconds.append(round(time.perf_counter() - started, 1))
            (folder / BUILT).write_text(json.dumps({"launch": launch_id(), "seconds": seconds[0]}))

        say_once = functools.cache(lambda: say("waiting for another process to prepare the data"))
        once(entry, build_and_record, say_once, lambda at: self.find_fault(at, key, read) is None)
        return f"miss: built in {seconds[0]} s" if seconds else "miss: built by another process"

    def find_fault(
        self, entry: Path, key: dict[str, Any], read: Callable[..., CacheEntry]
    ) -> str | None:
        """Return why an entry cannot be used, or None; checks only the sizes of its files."""
        if fault := damage(entry, quick=True):
            return fault
        try:
            stored_key = read(entry, False).facts["key_parts"]
            built = json.loads((entry / BUILT).read_text()) if self.refresh else {}
        except (DataError, LookupError, OSError, ValueError) as error:
            return reason_of(error)
        if stored_key != json.loads(json.dumps(key)):
            return "it was built for another key"
        return "refresh = true" if self.refresh and built["launch"] != launch_id() else None

    @hookimpl
    def summary(self) -> str:
        """Report hits and misses."""
        return "; ".join(self.results) or "not asked for any data"


def launch_id() -> str:
    """Return an identifier of this launch, which all its ranks share."""
    process = psutil.Process()
    if "RANK" in os.environ:
        process = process.parent() or process
    return f"{process.pid} {process.create_time()} {os.environ.get('MASTER_PORT')}"
