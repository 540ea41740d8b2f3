"""Folders that appear whole or not at all, and are built by exactly one of many processes."""

import errno
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .digests import digest, file_digest
from .errors import DiskError, PlugsftError
from .machine import free_disk

MANIFEST = "manifest.json"
PARTS = "data-*"
"""Files of a dead builder that the next one goes on from: under such a name they are whole."""
HEARTBEAT = 1.0
PATIENCE = 30.0
"""Seconds without a heartbeat after which a builder on another machine counts as dead."""
STALE = 86_400
"""Seconds after which what another machine left half-built is swept."""


def _here() -> str:
    """Name this machine since its last start, and the container whose process numbers we see."""
    place = {}
    with suppress(OSError):
        place["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text()
        place["container"] = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{socket.gethostname()}.{digest(place)[:8]}"


HERE = _here()
# How the writers of safetensors and tokenizers (in Rust) and of torch (in C++) say OSError.
FOREIGN = ("(os error ", "inline_container", "iostream error")
FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))

Stands = Callable[[Path], bool]
"""Whether a folder may stay as it is."""
Watch = dict[Path, tuple[Any, float]]
"""The last beat of a claim, and since when we have seen no other."""


@contextmanager
def publish(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Give a new folder to fill; at the end it takes its real name, checked and synced to disk."""
    building = folder.with_name(f".{folder.name}.{HERE}-{os.getpid()}.tmp")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            yield building
            _finish(building, folder, lambda there: not replace and is_published(there))
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _finish(building: Path, folder: Path, stands: Stands) -> None:
    """Give a folder that was built its real name, unless the one that has it may stay."""
    for half in building.rglob(".*.tmp"):
        _remove(half)
    files = [path for path in sorted(building.rglob("*")) if path.is_file()]
    manifest = {str(path.relative_to(building)): _stamp(path) for path in files}
    write_text(building / MANIFEST, json.dumps(manifest, indent=1))
    for path in [*building.rglob("*"), building]:
        _sync(path)
    if not stands(folder):
        discard(folder)
    try:
        building.rename(folder)
    except OSError:
        # The loser of a race finds the name taken by an equal folder: its own copy goes.
        if not is_published(folder):
            raise
        _remove(building)
    _sync(folder.parent)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn a failure to write into one line that says where, and how much room there is."""
    try:
        yield
    except Exception as error:
        foreign = any(sign in str(error) for sign in FOREIGN)
        if isinstance(error, PlugsftError) or not (foreign or isinstance(error, OSError)):
            raise
        reason, cure = " ".join(str(error).split()), "give another folder (output=...)"
        # torch says no more than that it did not come as far as it wanted.
        full = any(sign in reason for sign in (*FULL, "unexpected pos"))
        if full:
            room = free_disk(place) / 2**20
            shown = f"{room:.0f} MiB" if room < 1024 else f"{room / 1024:.2f} GiB"
            reason = f"the disk is full ({shown} are free): {reason}"
            cure = f"free some, or {cure}"
        raise DiskError(f"{place}: cannot be written: {reason}", cure) from error


def is_published(folder: Path) -> bool:
    """Tell whether a folder was published, at the cost of one look."""
    return (folder / MANIFEST).is_file()


def is_whole(folder: Path) -> bool:
    """Tell whether a folder was published and looks unharmed, without reading all of it."""
    return is_published(folder) and damage(folder, quick=True) is None


def damage(folder: Path, quick: bool = False) -> str | None:
    """Compare a published folder with its manifest; return what is wrong, or None.

    Quick compares all sizes, and the bytes of *.json alone: it takes as long for any data.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, (size, checksum) in manifest.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            sized = path.stat().st_size == size
            unread = sized and quick and path.suffix != ".json"
            if not unread and not (sized and file_digest(path) == checksum):
                return f"{name} is not what was written"
    except (PlugsftError, OSError, ValueError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    return None


def discard(folder: Path) -> None:
    """Remove a folder so that nobody ever sees half of it."""
    mine = f"{uuid.uuid4().hex[:8]}.{HERE}-{os.getpid()}"
    doomed = folder.with_name(f".{folder.name}.{mine}.tmp")
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    _remove(doomed)


def sweep(parent: Path) -> None:
    """Remove what killed processes left half-built: of this machine at once, of others in a day."""
    for path in parent.glob(".*.tmp"):
        pid = path.name.removesuffix(".tmp").rpartition("-")[2]
        with suppress(OSError):
            if f".{HERE}-" in path.name and pid.isdigit():
                gone = not _runs(int(pid))
            else:
                times = (inner.lstat().st_mtime for inner in [path, *path.rglob("*")])
                gone = time.time() - max(times) > STALE
            if gone:
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new, never half of one."""
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            half.write_text(text, encoding="utf8")
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)


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
            _finish(building, folder, stands)
    except Exception:
        # Not after ctrl-C or a signal: the next builder goes on from what is there.
        _remove(building)
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
        _remove(old)
    with suppress(FileNotFoundError):
        for last in found[-1:]:
            last.rename(building)
    building.mkdir(exist_ok=True)
    for path in building.iterdir():
        if not path.match(PARTS):
            _remove(path)


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
        if holder["host"] == HERE and not _runs(int(holder["pid"])):
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


def _runs(pid: int) -> bool:
    # A killed process whose parent has not looked yet is a zombie: it has a number, and no life.
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _stamp(path: Path) -> list[int | str]:
    return [path.stat().st_size, file_digest(path)]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
