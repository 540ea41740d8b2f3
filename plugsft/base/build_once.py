"""Build a folder in one of many processes; the next goes on from a killed one's files.

A claim is a file that a process touches every second. It is a hint, so that the others wait; it
works between machines, where locks of the operating system may not, and needs no process group.
A wrong hint does no harm: each process builds in a folder of its own, and the first one that is
complete gets the name. A process that goes on from another's files renames their folder first.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .atomic import (
    FINISHED_FILES,
    HOST_ID,
    IsComplete,
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
"""Seconds without a heartbeat after which a process on another machine counts as dead."""
BUILDER = "builder"
"""The name of the claim that one process has alone."""
Fill = Callable[[Path], None]
"""Builds a folder."""

say_once = cache(say)


@dataclass(frozen=True)
class Claim:
    """A file that says who works on a folder."""

    path: Path
    text: str

    def holds(self) -> bool:
        """Tell whether the claim is still ours: a process without heartbeat loses it."""
        return text_of(self.path) == self.text


class Claims:
    """The claims to a folder, and when each was last seen to beat."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._beats: dict[Path, tuple[int, float]] = {}

    def path(self, name: str) -> Path:
        """Name the file of a claim."""
        return self.folder.with_name(f".{self.folder.name}.claim-{name}")

    def living(self) -> list[Path]:
        """Find the claims of processes that seem alive; remove those of dead ones."""
        living = []
        for path in sorted(self.folder.parent.glob(self.path("*").name)):
            if self.seems_alive(path):
                living.append(path)
            else:
                path.unlink(missing_ok=True)
        return living

    def seems_alive(self, path: Path) -> bool:
        """Tell whether the process that wrote a file seems alive."""
        owner, now = (text_of(path) or "").split(), time.monotonic()
        if len(owner) == 3 and owner[0] == HOST_ID and not is_alive(int(owner[1])):
            return False
        try:
            beat = path.stat().st_mtime_ns
        except OSError:
            return True  # just removed: look again
        # Clocks differ between machines, so we measure how long we have seen no new heartbeat.
        if self._beats.get(path, (0, 0.0))[0] != beat:
            self._beats[path] = beat, now
        return now - self._beats[path][1] <= PATIENCE

    @contextmanager
    def hold(self, name: str) -> Iterator[Claim | None]:
        """Create a claim, and beat until the block ends; yield None if there is one."""
        text = f"{HOST_ID} {os.getpid()} {time.time_ns()}"
        own, stop = Claim(self.path(name), text), threading.Event()
        try:
            with own.path.open("x") as file:
                file.write(text)
        except FileExistsError:
            yield None
            return
        heart = threading.Thread(target=_beat, args=(own, stop), daemon=True)
        heart.start()
        try:
            yield own
        finally:
            stop.set()
            heart.join()
            if own.holds():
                own.path.unlink(missing_ok=True)

    @contextmanager
    def build(self) -> Iterator[Claim | None]:
        """Give the right to build to one process at a time, and None to the others."""
        if self.living():
            yield None
        else:
            with self.hold(BUILDER) as own:
                yield own


def once(folder: Path, is_complete: IsComplete = is_whole, *, fill: Fill) -> bool:
    """Build a folder in one of the calling processes, if it is not complete; True in that one."""
    claims = Claims(folder)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        while not is_complete(folder):
            with claims.build() as own:
                if own is None:
                    say_once(f"waiting for another process, which makes {folder}")
                    time.sleep(0.05 + os.getpid() % 100 / 1000)
                elif not is_complete(folder) and _build(folder, fill, own, is_complete):
                    return True
    return False


def build_folders(folder: Path) -> list[Path]:
    """Find where living or dead processes build a folder, the oldest first."""
    return sorted(folder.parent.glob(f".{folder.name}.parts-*"))


def take_over(folders: list[Path], building: Path) -> None:
    """Make a folder to build in, with the files of the last dead builder if there is one."""
    for folder in folders[:-1]:
        remove(folder)
    if folders:
        with suppress(OSError):  # another process was first
            folders[-1].rename(building)
    building.mkdir(exist_ok=True)


def text_of(path: Path) -> str | None:
    """Read a claim; None if it does not exist."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return None


def _build(folder: Path, fill: Fill, own: Claim, is_complete: IsComplete) -> bool:
    """Build a folder; return False if another process has taken over meanwhile."""
    building = folder.with_name(f".{folder.name}.parts-{time.time_ns()}-{os.getpid()}")
    try:
        sweep(folder.parent)
        take_over(build_folders(folder), building)
        # A builder that is only asleep cannot write to its unfinished files later.
        for path in building.iterdir():
            if path.is_symlink() or not path.match(FINISHED_FILES):
                remove(path)
        fill(building)
        finish(building, folder, is_complete)
    except Exception:
        # After Ctrl-C or a signal, finished files stay for the next builder.
        remove(building)
        if own.holds():
            raise
        return False
    return True


def _beat(own: Claim, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT):
        with suppress(OSError):
            if own.holds():
                os.utime(own.path)
