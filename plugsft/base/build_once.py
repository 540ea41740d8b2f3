"""Build a folder in exactly one of many processes; the next goes on from a killed one's files."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .atomic import (
    FINISHED_FILES,
    HOST_ID,
    IsComplete,
    discard,
    finish,
    is_alive,
    is_whole,
    remove,
    sweep,
    writing,
)
from .console import say

HEARTBEAT = 1.0
PATIENCE = 30.0
"""Seconds without a heartbeat after which a builder on another machine counts as dead."""
Watch = dict[Path, tuple[Any, float]]
"""Claim -> its last heartbeat, and when we first saw it."""
Fill = Callable[[Path], None]
"""Builds a folder."""
Share = Callable[[Path, IsComplete], None] | None
"""Builds parts of a folder together with other processes, until all are there."""


say_once = cache(say)


def once(
    folder: Path, is_complete: IsComplete = is_whole, *, fill: Fill, share: Share = None
) -> bool:
    """Build a folder in one of the calling processes, if it is not complete; True in that one.

    Before, each process calls `share`, if there is one, to build parts together with the others.
    The right to build is a file with a heartbeat: it works between machines, where locks of the
    operating system may not, and needs no process group.
    """
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    watch: Watch = {}
    while not is_complete(folder):
        if share:
            share(folder, is_complete)
        with claim(folder, watch) as own:
            if own is None:
                say_once(f"waiting for another process, which makes {folder}")
                # Processes that claim at the same time all give up: they retry at other times.
                time.sleep(0.05 + os.getpid() % 100 / 1000)
            elif not is_complete(folder) and _build(folder, fill, own, is_complete):
                return True
    return False


@dataclass(frozen=True)
class Claim:
    """The right to build a folder."""

    path: Path
    text: str

    def holds(self) -> bool:
        """Tell whether the claim is still ours: a process without heartbeat loses it."""
        return text_of(self.path) == self.text


@contextmanager
def claim(folder: Path, watch: Watch) -> Iterator[Claim | None]:
    """Give the right to build a folder to one process at a time, and None to the others.

    The claim with the highest number wins. So a dead builder's claim is superseded by the next
    number: creating a new name is atomic on every file system, replacing a file is not.
    """
    earlier = claims_of(folder)
    if is_claimed(folder, watch):
        yield None
        return
    numbers = [int(path.name[-6:]) for path in [*earlier, *build_folders(folder)]]
    path = folder.with_name(f".{folder.name}.claim-{max(numbers, default=0) + 1:06d}")
    with create_claim(path) as own:
        # Another process may have created a lower number since we listed the claims.
        if own and claims_of(folder).items() <= (earlier | {own.path: own.text}).items():
            for dead in earlier:
                dead.unlink(missing_ok=True)
            yield own
        else:
            yield None


def is_claimed(folder: Path, watch: Watch) -> bool:
    """Tell whether a process that seems alive builds a folder."""
    # A list, not a generator: every claim is watched from the first call on.
    alive = [seems_alive(path, text, watch) for path, text in claims_of(folder).items()]
    return any(alive)


def build_folders(folder: Path) -> list[Path]:
    """Return the folders in which living or dead processes build a folder."""
    return sorted(folder.parent.glob(f".{folder.name}.parts-*"))


def _build(folder: Path, fill: Fill, own: Claim, is_complete: IsComplete) -> bool:
    """Build a folder; return False if another process has taken over meanwhile."""
    building = own.path.with_name(own.path.name.replace(".claim-", ".parts-"))
    try:
        with writing(folder):
            sweep(folder.parent)
            _take_over(build_folders(folder), building)
            fill(building)
            if folder.exists() and not is_complete(folder):
                discard(folder)
            finish(building, folder, is_complete)
    except Exception:
        # After Ctrl-C or a signal, finished files stay for the next builder.
        remove(building)
        if own.holds():
            raise
        return False
    return True


def _take_over(folders: list[Path], building: Path) -> None:
    """Go on from the finished files of the last dead builder.

    It may only be asleep. So its folder is renamed, and its unfinished files are removed: it
    cannot write to them later.
    """
    for folder in folders[:-1]:
        remove(folder)
    with suppress(FileNotFoundError):
        for last in folders[-1:]:
            last.rename(building)
    building.mkdir(exist_ok=True)
    for path in building.iterdir():
        if path.is_symlink() or not path.match(FINISHED_FILES):
            remove(path)


@contextmanager
def create_claim(path: Path) -> Iterator[Claim | None]:
    """Create a claim, and beat until the block ends; yield None if another was first."""
    own = Claim(path, json.dumps({"host": HOST_ID, "pid": os.getpid(), "at": time.time_ns()}))
    file = None
    with writing(path), suppress(FileExistsError):
        file = path.open("x")
    if file is None:
        yield None
        return
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(HEARTBEAT):
            with suppress(OSError):
                if own.holds():
                    os.utime(path)

    heart = threading.Thread(target=beat, name="plugsft-heartbeat", daemon=True)
    heart.start()
    try:
        with writing(path), file:
            file.write(own.text)
        yield own
    finally:
        stop.set()
        heart.join()
        if own.text.startswith(text_of(path) or ""):
            path.unlink(missing_ok=True)


def claims_of(folder: Path) -> dict[Path, str]:
    """Return the claims to a folder with their texts."""
    paths = folder.parent.glob(f".{folder.name}.claim-*")
    return {path: text for path in sorted(paths) if (text := text_of(path)) is not None}


def text_of(path: Path) -> str | None:
    """Return the text of a claim; None if it does not exist."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return None


def seems_alive(path: Path, text: str, watch: Watch) -> bool:
    """Tell whether the owner of a claim seems to be alive."""
    with suppress(ValueError, TypeError, LookupError):
        owner = json.loads(text)
        if owner["host"] == HOST_ID and not is_alive(int(owner["pid"])):
            return False
    try:
        beat = (path.stat().st_mtime_ns, text)
    except OSError:
        return True  # just removed: check again
    # Clocks differ between machines, so we measure how long we have seen no new heartbeat.
    now = time.monotonic()
    last, since = watch.setdefault(path, (beat, now))
    if last != beat:
        watch[path] = (beat, now)
    return last != beat or now - since <= PATIENCE
