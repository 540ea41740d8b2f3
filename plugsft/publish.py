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
from pathlib import Path

import psutil

from .digests import file_digest
from .errors import DiskError, PlugsftError
from .machine import free_disk

MANIFEST = "manifest.json"
HEARTBEAT = 1.0
PATIENCE = 30.0
"""Seconds without a heartbeat after which a builder on another machine counts as dead."""


def _here() -> str:
    """Name this machine, and in it the container whose process numbers we see."""
    with suppress(OSError):
        return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


HERE = _here()
# How the writers of safetensors and tokenizers (in Rust) and of torch (in C++) say OSError.
FOREIGN = ("(os error ", "inline_container", "iostream error")
FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


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
            _finish(building, folder, replace)
        finally:
            shutil.rmtree(building, ignore_errors=True)


@contextmanager
def publish_on(folder: Path) -> Iterator[Path]:
    """Like publish, but what a killed builder had made already is there to go on from."""
    building = parts_of(folder)
    with writing(folder):
        building.mkdir(parents=True, exist_ok=True)
        try:
            yield building
            _finish(building, folder, replace=False)
        except Exception:
            # Not after ctrl-C or a signal: the next run wants it.
            shutil.rmtree(building, ignore_errors=True)
            raise


def parts_of(folder: Path) -> Path:
    """Return where a folder is built bit by bit."""
    return folder.with_name(f".{folder.name}.parts")


def _finish(building: Path, folder: Path, replace: bool) -> None:
    files = [path for path in sorted(building.rglob("[!.]*")) if path.is_file()]
    manifest = {str(path.relative_to(building)): _stamp(path) for path in files}
    write_text(building / MANIFEST, json.dumps(manifest, indent=1))
    for path in [*building.rglob("*"), building]:
        _sync(path)
    if replace:
        discard(folder)
    try:
        building.rename(folder)
    except OSError:
        # The loser of a race finds the name taken by an equal folder: its own copy goes.
        if not is_published(folder):
            raise
        shutil.rmtree(building, ignore_errors=True)
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
        raise DiskError(f"{place}: cannot be written: {reason}; {cure}") from error


def is_published(folder: Path) -> bool:
    """Tell whether a folder was published, at the cost of one look."""
    return (folder / MANIFEST).is_file()


def damage(folder: Path) -> str | None:
    """Compare a published folder with its manifest; return what is wrong, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, (size, digest) in manifest.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _stamp(folder / name) != [size, digest]:
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
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove what killed processes of this machine left half-built."""
    for path in parent.glob(f".*.{HERE}-*.tmp"):
        pid = path.name.removesuffix(".tmp").rpartition("-")[2]
        if pid.isdigit() and not _runs(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


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
    folder: Path, build: Callable[[Path], None], waiting: Callable[[], None] = lambda: None
) -> Path:
    """Return a published folder, built by one of all the processes that ask for it.

    No lock of the operating system and no collective: a claim file with a heartbeat, which also
    works between machines. A dead builder's claim is not removed but outbid by the next number,
    since creating a new name is the only step that every file system makes atomic.
    """
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    watch: dict[Path, tuple[float, float]] = {}
    while not is_published(folder):
        claims = sorted(folder.parent.glob(f".{folder.name}.claim-*"))
        number = int(claims[-1].name.rpartition("-")[2]) if claims else 0
        if claims and not _is_dead(claims[-1], watch):
            waiting()
            time.sleep(0.1)
            continue
        mine = folder.with_name(f".{folder.name}.claim-{number + 1:06d}")
        with _held(mine) as won:
            if won and not is_published(folder):
                for claim in claims:
                    claim.unlink(missing_ok=True)
                sweep(folder.parent)
                _build(folder, build)
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    try:
        with publish_on(folder) as building:
            build(building)
    except Exception:
        # A builder that was thought dead, and was asleep, finds that another has finished.
        if not is_published(folder):
            raise


@contextmanager
def _held(claim: Path) -> Iterator[bool]:
    with writing(claim):
        try:
            file = claim.open("x")
        except FileExistsError:
            yield False
            return
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(HEARTBEAT):
            with suppress(OSError):
                os.utime(claim)

    heart = threading.Thread(target=beat, name="plugsft-heartbeat", daemon=True)
    heart.start()
    try:
        with writing(claim), file:
            json.dump({"host": HERE, "pid": os.getpid()}, file)
        yield True
    finally:
        stop.set()
        heart.join()
        claim.unlink(missing_ok=True)


def _is_dead(claim: Path, watch: dict[Path, tuple[float, float]]) -> bool:
    try:
        beat = claim.stat().st_mtime
        holder = json.loads(claim.read_text() or "{}")
    except (OSError, ValueError):
        return False  # it ended, or is being written, as we looked
    if holder.get("host") == HERE and not _runs(holder["pid"]):
        return True
    # Clocks differ between machines: what counts is how long *we* have seen no new beat.
    last, since = watch.get(claim, (None, 0.0))
    if last != beat:
        watch[claim] = (beat, time.monotonic())
        return False
    return time.monotonic() - since > PATIENCE


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
