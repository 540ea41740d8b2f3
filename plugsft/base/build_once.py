"""One builder among many processes: a claim with a heartbeat, and parts that outlive a kill."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .atomic import HERE, PARTS, Stands, discard, finish, is_whole, remove, runs, sweep, writing

HEARTBEAT = 1.0
PATIENCE = 30.0
"""Seconds without a heartbeat after which a builder on another machine counts as dead."""
Watch = dict[Path, tuple[Any, float]]
"""The last beat of a claim, and since when we have seen no other."""


def once(
    folder: Path,
    build: Callable[[Path], None],
    waiting: Callable[[], None] = lambda: None,
    stands: Stands = is_whole,
) -> Path:
    """Return a folder, built by one of all the processes that ask for it, unless it stands.

    No lock of the operating system and no collective: a claim with a heartbeat, which also works
    between machines.
    """
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    watch: Watch = {}
    while not stands(folder):
        with claim(folder, watch) as mine:
            if mine is None:
                waiting()
                # Not in step with another that also found it was not alone.
                time.sleep(0.05 + os.getpid() % 100 / 1000)
            elif not stands(folder) and _build(folder, build, mine, stands):
                break
    return folder


@dataclass(frozen=True)
class Claim:
    """The right to build a folder."""

    path: Path
    text: str

    def holds(self) -> bool:
        """Tell whether it is still ours: who sleeps for long is taken for dead."""
        return _text(self.path) == self.text


@contextmanager
def claim(folder: Path, watch: Watch) -> Iterator[Claim | None]:
    """Give the right to build a folder to one process at a time, and None to the others.

    A dead builder's claim is not removed but outbid by the next number, since creating a new name
    is a step that every file system makes atomic.
    """
    rivals = _claims(folder)
    if is_claimed(folder, watch):
        yield None
        return
    numbers = [int(path.name[-6:]) for path in [*rivals, *parts_of(folder)]]
    path = folder.with_name(f".{folder.name}.claim-{max(numbers, default=0) + 1:06d}")
    with _held(path) as mine:
        # Another may have looked before us, and created a lower number after our look.
        if mine and _claims(folder).items() <= (rivals | {mine.path: mine.text}).items():
            for rival in rivals:
                rival.unlink(missing_ok=True)
            yield mine
        else:
            yield None


def is_claimed(folder: Path, watch: Watch) -> bool:
    """Tell whether a process that seems alive builds a folder."""
    alive = [_lives(path, text, watch) for path, text in _claims(folder).items()]
    return any(alive)  # of all of them: each is watched from the first look on


def parts_of(folder: Path) -> list[Path]:
    """Return where a folder is being built, or was by one that is dead."""
    return sorted(folder.parent.glob(f".{folder.name}.parts-*"))


def _build(folder: Path, build: Callable[[Path], None], mine: Claim, stands: Stands) -> bool:
    """Build a folder; return False if another has taken over meanwhile."""
    building = mine.path.with_name(mine.path.name.replace(".claim-", ".parts-"))
    try:
        with writing(folder):
            sweep(folder.parent)
            _take_over(parts_of(folder), building)
            build(building)
            if folder.exists() and not stands(folder):
                discard(folder, sized=False)  # a truncated file of ours is not a user's
            finish(building, folder, stands)
    except Exception:
        # Not after ctrl-C or a signal: the next builder goes on from what is there.
        remove(building)
        if mine.holds():
            raise
        return False
    return True


def _take_over(found: list[Path], building: Path) -> None:
    """Go on from a dead builder's finished parts.

    It may be asleep: under its new name, and without the files that were being written, the folder
    is out of its reach.
    """
    for old in found[:-1]:
        remove(old)
    with suppress(FileNotFoundError):
        for last in found[-1:]:
            last.rename(building)
    building.mkdir(exist_ok=True)
    for path in building.iterdir():
        if not path.match(PARTS):
            remove(path)


@contextmanager
def _held(path: Path) -> Iterator[Claim | None]:
    """Create a claim and keep its heart beating; None where another was first."""
    mine = Claim(path, json.dumps({"host": HERE, "pid": os.getpid(), "at": time.time_ns()}))
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
                if mine.holds():
                    os.utime(path)

    heart = threading.Thread(target=beat, name="plugsft-heartbeat", daemon=True)
    heart.start()
    try:
        with writing(path), file:
            file.write(mine.text)
        yield mine
    finally:
        stop.set()
        heart.join()
        if mine.text.startswith(_text(path) or ""):
            path.unlink(missing_ok=True)


def _claims(folder: Path) -> dict[Path, str]:
    """Return the claims to a folder, with what they say."""
    found = sorted(folder.parent.glob(f".{folder.name}.claim-*"))
    return {path: text for path in found if (text := _text(path)) is not None}


def _text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return None


def _lives(path: Path, text: str, watch: Watch) -> bool:
    """Tell whether the holder of a claim seems to be alive."""
    with suppress(ValueError, TypeError, LookupError):
        holder = json.loads(text)
        if holder["host"] == HERE and not runs(int(holder["pid"])):
            return False
    try:
        beat = (path.stat().st_mtime_ns, text)
    except OSError:
        return True  # it ended as we looked: look again
    # Clocks differ between machines: what counts is how long *we* have seen no new beat.
    now = time.monotonic()
    last, since = watch.setdefault(path, (beat, now))
    if last != beat:
        watch[path] = (beat, now)
    return last != beat or now - since <= PATIENCE
