"""Entries of the cache: list and remove them."""

import fcntl
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..base.atomic import MANIFEST, damage, discard, is_published, remove, sweep, writing
from ..base.build_once import Claims, build_folders
from ..base.checksums import cache_folder
from ..base.console import format_size, say
from ..base.errors import DataError, DiskError, reason_of
from ..base.for_commands import print_table
from ..base.limits import read_json_object
from ..tokens.store import Tokens

TOKENS = "tokens"
"""The folder of prepared data in the cache."""
NAME = re.compile("[0-9a-f]{16}")
"""The name of an entry: the digest of its key."""
UNFINISHED = re.compile(r"\.(.+?)\.(?:claim|parts)-.+")
"""Files that the builder of an entry leaves if it dies."""


@dataclass
class Entry:
    """Prepared data in the cache."""

    folder: Path
    facts: dict[str, Any]
    size: int
    used: float
    damage: str | None

    @property
    def sources(self) -> str:
        """The names of its sources."""
        names = ", ".join(str(source.get("name", "?")) for source in self.facts.get("sources", []))
        return f"{self.facts['kind']} of {names}" if "kind" in self.facts else names


def ls() -> None:
    """Print a line for each entry, the last used first."""
    home = cache_folder() / TOKENS
    listed = list(entries(home))
    rows = [["key", "rows", "tokens", "size", "last used", "state", "sources"]]
    rows += [
        [
            entry.folder.name,
            f"{entry.facts.get('rows', 0):,}",
            f"{entry.facts.get('tokens', 0):,}",
            format_size(entry.size),
            datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M"),
            f"damaged: {entry.damage}" if entry.damage else "sizes match",
            entry.sources,
        ]
        for entry in listed
    ]
    if listed:
        print_table(rows, range(1, 4))
    unfinished = len(_being_built(home))
    note = f"; {unfinished} unfinished" if unfinished else ""
    say(f"{home}: {_count(listed)}, {format_size(sum(entry.size for entry in listed))}{note}")


def gc(keep_days: float | None) -> None:
    """Remove entries that are unused for long, and unfinished builds of dead processes."""
    home = cache_folder() / TOKENS
    removed = list[int]()
    """Bytes of each that is gone."""
    for entry in list(entries(home)):
        name, size = entry.folder.name, format_size(entry.size)
        if keep_days is None or time.time() - entry.used <= keep_days * 86_400:
            continue
        if _is_open(entry.folder):
            say(f"in use   {name}  {size}")
            continue
        try:
            discard(entry.folder)
        except DiskError as error:
            say(f"left     {name}  {size}  {error}")
            continue
        say(f"removed  {name}  {size}  not used for {keep_days:g} days, from {entry.sources}")
        removed.append(entry.size)
    for name, length in _remove_unfinished(home):
        say(f"removed  {name}  {format_size(length)}  unfinished")
        removed.append(length)
    left = list(entries(home))
    size = format_size(sum(entry.size for entry in left))
    freed = format_size(sum(removed))
    say(f"{home}: removed {len(removed):,}, {freed}; {_count(left)} left, {size}")


def _is_open(entry: Path) -> bool:
    """Tell whether a process uses an entry, and so locks it."""
    with suppress(OSError), (entry / MANIFEST).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def entries(home: Path) -> Iterator[Entry]:
    """Yield the entries of a folder, the last used first."""
    paths = [path for path in home.glob("*") if NAME.fullmatch(path.name) and is_published(path)]
    for path in sorted(paths, key=_used, reverse=True):
        used, problem, facts = _used(path), damage(path, quick=True), {}
        try:
            if (path / "index.arrow").exists():
                facts = Tokens(path).facts
            else:  # of a plugin
                facts = read_json_object(path / "facts.json")
        except (DataError, OSError, ValueError) as error:
            problem = problem or reason_of(error)
        if is_published(path):
            yield Entry(path, facts, _size(path), used, problem)


def _remove_unfinished(home: Path) -> Iterator[tuple[str, int]]:
    """Remove unfinished builds whose process died on this machine; yield names and sizes."""
    for name in sorted(_being_built(home)):
        folder = home / name
        # The claim lets a new builder wait; it is None if one lives.
        with writing(folder), Claims(folder).build() as claimed:
            paths = build_folders(folder)
            if claimed is not None and paths:
                yield name, sum(map(_size, paths))
                for path in paths:
                    remove(path)
    sweep(home)


def _being_built(home: Path) -> set[str]:
    matches = (UNFINISHED.fullmatch(path.name) for path in home.glob(".*"))
    return {match[1] for match in matches if match}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _used(folder: Path) -> float:
    """Return when an entry was last used; 0 if it was removed."""
    with suppress(OSError):
        return (folder / MANIFEST).stat().st_mtime
    return 0.0


def _count(listed: Sequence[Entry]) -> str:
    return f"{len(listed):,} {'entry' if len(listed) == 1 else 'entries'}"
