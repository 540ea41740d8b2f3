"""Keep prepared tokens in a folder that all runs share, and open them there in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plugsft import (
    DiskError,
    Folder,
    RecipeError,
    cache_folder,
    digest,
    hookimpl,
    plugin,
    say,
    state,
)


@plugin(provides={"cached_tokens": "folder"})
class ArrowCache:
    """Keep prepared tokens in a folder that all runs share, and open them there in milliseconds.

    The name of an entry is a checksum of everything that its tokens depend on. One process builds
    it while the others wait, and it appears whole or not at all.
    """

    folder: Folder | None = None
    """Folder of the cache. Default: $PLUGSFT_CACHE, or ~/.cache/plugsft if that is not set."""
    read_only: bool = False
    """Read the cache, but write nothing there; missing data is prepared in the run's output."""
    in_memory: bool = False
    """Read all tokens at once, for file systems where mapping is slow."""

    results: list[str] = state([])
    """Hit or miss of each entry."""

    @hookimpl
    def check(self) -> None:
        """Refuse a file in place of the folder."""
        if self.folder and Path(self.folder).is_file():
            raise RecipeError(f"folder: {self.folder} is a file; give a folder")

    @hookimpl
    def cache(
        self,
        key: dict[str, Any],
        build: Callable[..., bool],
        read: Callable[..., Any],
    ) -> Any:
        """Open an entry, or build it; if the disk refuses, let the core store the tokens."""
        from .entry import Entry

        started = time.perf_counter()
        home = Path(self.folder) if self.folder else cache_folder()
        entry = Entry(home / "tokens" / digest(key), key, read, self.read_only)
        try:
            built = entry.ensure(build)
        except DiskError as error:
            say(f"cache: not used, the run continues without it: {error.reason}")
            self.results.append(f"not used: {error.reason}")
            return None
        artefact = entry.open(self.in_memory)
        milliseconds = (time.perf_counter() - started) * 1e3
        hit = f"hit: {entry.folder.name}, opened in {milliseconds:.0f} ms"
        self.results.append(f"{built}, stored in {entry.folder}" if built else hit)
        return artefact

    @hookimpl
    def summary(self) -> str:
        """Report hits and misses."""
        return "; ".join(self.results) or "not asked for any data"
