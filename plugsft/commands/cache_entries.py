"""Entries of the cache: list, remove and verify them."""

import fcntl
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from ..base.atomic import MANIFEST, damage, discard, is_published, remove, sweep
from ..base.build_once import Watch, build_folders, claim, is_claimed
from ..base.checksums import cache_folder
from ..base.console import format_size, out, parse_size, say
from ..base.errors import DataError, PlugsftError
from ..tokens.store import Tokens

NAME = re.compile("[0-9a-f]{16}")
"""Of an entry: the digest of its key."""
UNDER_WAY = re.compile(r"\.(.+)\.(?:claim|parts)-\d+")
"""What stands beside an entry that is being built, or was when its builder died."""


@dataclass
class Entry:
    """Prepared data in the cache."""

    folder: Path
    facts: dict[str, Any]
    size: int
    made: float
    used: float
    harm: str | None

    @property
    def sources(self) -> str:
        """The names of what it was made from."""
        names = ", ".join(str(one.get("name", "?")) for one in self.facts.get("sources", []))
        return f"{self.facts['kind']} of {names}" if "kind" in self.facts else names


def ls(folder: Path | None) -> None:
    """Print a line for each entry, the last used first."""
    home = tokens_folder(folder)
    found = list(entries(home))
    rows = [["key", "rows", "tokens", "size", "made", "last used", "state", "from"]]
    rows += [
        [
            one.folder.name,
            f"{one.facts.get('rows', 0):,}",
            f"{one.facts.get('tokens', 0):,}",
            format_size(one.size),
            time_of(one.made),
            time_of(one.used),
            f"damaged: {one.harm}" if one.harm else "sizes fit",
            one.sources,
        ]
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows if found else []):
        cells = [
            text.rjust(wide) if 0 < place < 4 else text.ljust(wide)
            for place, (text, wide) in enumerate(zip(row, widths, strict=True))
        ]
        out.print(Text("  ".join(cells).rstrip(), "" if number else "bold"))
    under_way = len(_under_way(home))
    note = f"; {under_way} being built, or left half-built" if under_way else ""
    say(f"{home}: {_count(found)}, {format_size(sum(one.size for one in found))}{note}")


def gc(folder: Path | None, keep_days: float | None, max_size: str | None, dry_run: bool) -> None:
    """Remove what has not been used for long, and what dead builders left."""
    home = tokens_folder(folder)
    limit = parse_size(max_size) if max_size is not None else None
    kept, gone, freed = list(entries(home)), 0, 0
    left = sum(one.size for one in kept)
    now, verb = time.time(), "would go" if dry_run else "removed"
    for last in reversed(tuple(kept)):
        too_old = keep_days is not None and now - last.used > keep_days * 86_400
        if not too_old and (limit is None or left <= limit):
            break
        if _used(last.folder) != last.used or _is_open(last.folder):
            say(f"stays    {last.folder.name}  {format_size(last.size)}  a run uses it")
            continue
        kept.remove(last)
        left -= last.size
        reason = f"not used for {keep_days:g} days" if too_old else "over --max-size"
        if not dry_run:
            discard(last.folder, sized=False)
        say(f"{verb}  {last.folder.name}  {format_size(last.size)}  {reason}, from {last.sources}")
        gone, freed = gone + 1, freed + last.size
    for name, size in _clear(home, dry_run):
        say(f"{verb}  {name}  {format_size(size)}  left half-built")
        gone, freed = gone + 1, freed + size
    say(f"{home}: {gone:,} {verb}, {format_size(freed)}; {_count(kept)} left, {format_size(left)}")


def _is_open(entry: Path) -> bool:
    """Tell whether a process uses an entry: it then holds a lock."""
    with suppress(OSError), (entry / MANIFEST).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def verify(folder: Path | None, remove: bool) -> None:
    """Read every byte of every entry, and compare with its checksum."""
    home = tokens_folder(folder)
    found = sorted(entries(home), key=lambda one: one.folder)
    damaged = 0
    for one in found:
        harm = damage(one.folder)
        say(f"{one.folder.name}  {f'damaged: {harm}' if harm else 'whole'}")
        damaged += harm is not None
        if harm and remove:
            discard(one.folder, sized=False)
    if damaged:
        raise PlugsftError(
            f"{home}: {damaged} of {_count(found)} damaged; "
            + ("removed: the" if remove else "give --remove, and the")
            + " next run that needs it builds it again"
        )
    say(f"{home}: {_count(found)}, all whole")


def entries(home: Path) -> Iterator[Entry]:
    """Yield what a folder holds of prepared data, the last used first."""
    found = [path for path in home.glob("*") if NAME.fullmatch(path.name) and is_published(path)]
    for path in sorted(found, key=_used, reverse=True):
        used, harm, facts = _used(path), damage(path, quick=True), {}
        try:
            facts = facts_of(path)
            made = (path / "facts.json").stat().st_mtime
        except (DataError, OSError, ValueError) as error:
            harm, made = harm or str(error), used
        if is_published(path):
            yield Entry(path, facts, _size(path), made, used, harm)


def facts_of(path: Path) -> dict[str, Any]:
    """Return what an entry says of itself: tokens, once they open, or what a plugin keeps."""
    if (path / "index.arrow").exists():
        return Tokens(path).facts
    facts: dict[str, Any] = json.loads((path / "facts.json").read_text())
    return facts


def _clear(home: Path, dry_run: bool) -> Iterator[tuple[str, int]]:
    """Remove what no living process holds; yield its names and sizes."""
    watch: Watch = {}
    for name in _abandoned(home, watch):
        folder = home / name
        doomed = build_folders(folder)
        if folder.exists() and not is_published(folder):
            doomed.append(folder)
        size = sum(map(_size, doomed))
        if not dry_run:
            # As its next builder would: who comes now waits for us.
            with claim(folder, watch) as mine:
                if mine is None or (folder in doomed and is_published(folder)):
                    continue
                for path in doomed:
                    remove(path)
        if doomed:
            yield name, size
    if not dry_run:
        sweep(home)


def _abandoned(home: Path, watch: Watch) -> list[str]:
    """Return the names of what was being built by processes that show no sign of life."""
    unfinished = {path.name for path in home.glob("*") if NAME.fullmatch(path.name)}
    unfinished = {name for name in unfinished if not is_published(home / name)}
    names, first = _under_way(home) | unfinished, dict[Path, Any]()
    alive: set[str] = set()
    while undecided := {name for name in names - alive if is_claimed(home / name, watch)}:
        for path, (beat, _) in watch.items():
            if first.setdefault(path, beat) != beat:
                alive |= {name for name in undecided if path.name.startswith(f".{name}.")}
        time.sleep(0.1)
    return sorted(names - alive)


def _under_way(home: Path) -> set[str]:
    matches = (UNDER_WAY.fullmatch(path.name) for path in home.glob(".*"))
    return {match[1] for match in matches if match}


def tokens_folder(folder: Path | None) -> Path:
    """Return where a cache folder, by default the user's, keeps prepared data."""
    return (folder or cache_folder()) / "tokens"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _used(folder: Path) -> float:
    """Return when an entry was last used; 0 if it has gone."""
    with suppress(OSError):
        return (folder / MANIFEST).stat().st_mtime
    return 0.0


def time_of(seconds: float) -> str:
    """Return a time of the clock, to the minute."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _count(found: Sequence[Entry]) -> str:
    return f"{len(found):,} {'entry' if len(found) == 1 else 'entries'}"
