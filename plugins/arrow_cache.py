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
    DataError,
    DiskError,
    Folder,
    Kept,
    Machine,
    RecipeError,
    cache_folder,
    damage,
    digest,
    hookimpl,
    once,
    plugin,
    say,
    state,
)
from plugsft.kit.tokens import opened

BUILT = "built.json"
"""File of an entry: the run that built it, and how long that took."""
ABSENT = "it is not there"


@plugin()
class ArrowCache:
    """Keep prepared tokens in a folder that all runs share, and open them there in milliseconds.

    The name of an entry is a checksum of everything that its tokens depend on. One of the processes
    that ask for it builds it, and it appears whole or not at all.
    """

    folder: Folder | None = None
    """Folder of the cache. Default: $PLUGSFT_CACHE, or ~/.cache/plugsft if that is not set."""
    refresh: bool = False
    """Build existing entries again, once in this run."""
    read_only: bool = False
    """Read the cache, but write nothing there; missing data is prepared in the run's output."""
    in_memory: bool = False
    """Read all tokens at once, for file systems where mapping is slow."""

    said: list[str] = state([])

    @hookimpl
    def check(self, machine: Machine) -> None:
        """Refuse contradicting options."""
        if self.folder and Path(self.folder).is_file():
            raise RecipeError(f"folder: {self.folder} is a file; give a folder")
        if self.refresh and self.read_only:
            raise RecipeError("refresh writes and read_only must not; set one of them")
        here = int(os.environ.get("LOCAL_WORLD_SIZE", machine.world_size))
        if self.refresh and here < machine.world_size:
            raise RecipeError(
                "refresh: each machine would rebuild entries that others read; first run "
                "`plugsft prepare RECIPE plugins.arrow_cache.refresh=true`, then launch without"
            )

    @hookimpl
    def cache(
        self, key: dict[str, Any], build: Callable[[Path], None], read: Callable[..., Kept]
    ) -> Kept | None:
        """Open an entry, or build it; where the disk does not allow that, leave it to the core."""
        started = time.perf_counter()
        home = Path(self.folder) if self.folder else cache_folder()
        entry = home / "tokens" / digest(key)
        there = os.path.exists(entry)
        wrong = self.wrong(entry, key, read) if there else ABSENT
        try:
            if wrong and self.read_only:
                raise DiskError(f"{entry}: {wrong}", "")
            if wrong and there:
                say(f"cache: {entry} is built again: {wrong}")
            found = self._build(entry, key, build, read) if wrong else "hit"
        except DiskError as error:
            say(f"cache: not used, the run goes on without it: {error.reason}")
            self.said.append(f"not used: {error.reason}")
            return None
        if not self.read_only:
            with suppress(OSError):
                os.utime(entry / "manifest.json")  # its time says when the entry was last used
        kept = opened(read, entry, self.in_memory)
        with suppress(OSError):  # a file system without locks
            # `cache gc` leaves an entry while somebody has it open.
            lock = os.open(entry / "manifest.json", os.O_RDONLY)
            weakref.finalize(kept, os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        took = time.perf_counter() - started
        self.said.append(
            f"{found}, kept in {entry}"
            if wrong
            else f"hit: {entry.name}, opened in {took * 1e3:.0f} ms"
        )
        return kept

    def _build(
        self,
        entry: Path,
        key: dict[str, Any],
        build: Callable[[Path], None],
        read: Callable[..., Kept],
    ) -> str:
        """Have an entry built by one process of all; say by whom."""
        built: list[float] = []

        def build_and_note(folder: Path) -> None:
            started = time.perf_counter()
            build(folder)
            built.append(round(time.perf_counter() - started, 1))
            (folder / BUILT).write_text(json.dumps({"launch": launch(), "seconds": built[0]}))

        waiting = functools.cache(lambda: say("waiting for another process to prepare the data"))
        once(entry, build_and_note, waiting, lambda there: self.wrong(there, key, read) is None)
        return f"miss: built in {built[0]} s" if built else "miss: built by another process"

    def wrong(self, entry: Path, key: dict[str, Any], read: Callable[..., Kept]) -> str | None:
        """Say why an entry cannot serve, if so, at the cost of a look at each file's size."""
        if harm := damage(entry, quick=True):
            return harm
        try:
            known = read(entry, False).facts["key_parts"]
            note = json.loads((entry / BUILT).read_text()) if self.refresh else {}
        except (DataError, LookupError, OSError, ValueError) as error:
            return str(error)
        if known != json.loads(json.dumps(key)):
            return "it was built for another key"
        return "refresh is asked for" if self.refresh and note["launch"] != launch() else None

    @hookimpl
    def verdict(self) -> str:
        """Say what was found."""
        return "; ".join(self.said) or "nothing was asked of it"


def launch() -> str:
    """Name what started this run: the same for all its ranks, and another in the next run."""
    process = psutil.Process()
    if "RANK" in os.environ:
        process = process.parent() or process
    return f"{process.pid} {process.create_time()} {os.environ.get('MASTER_PORT')}"
