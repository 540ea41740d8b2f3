"""Folders that appear whole or not at all, and are built by exactly one of many processes."""

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
import xxhash

from .errors import PlugsftError
from .machine import free_disk

MANIFEST = "manifest.json"
HEARTBEAT = 1.0
PATIENCE = 30.0
"""Seconds without a heartbeat after which a builder on another machine counts as dead."""

# How the writers of safetensors and tokenizers (in Rust) and of torch (in C++) say OSError.
FOREIGN = ("(os error ", "inline_container", "iostream error")


@contextmanager
def publish(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Give a new folder to fill; at the end it takes its real name, checked and synced to disk."""
    building = folder.with_name(f".{folder.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            yield building
            files = [path for path in sorted(building.rglob("*")) if path.is_file()]
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
            _sync(folder.parent)
        finally:
            shutil.rmtree(building, ignore_errors=True)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn a failure to write into one line that says where, and how much room there is."""
    try:
        yield
    except Exception as error:
        foreign = any(sign in str(error) for sign in FOREIGN)
        if isinstance(error, PlugsftError) or not (foreign or isinstance(error, OSError)):
            raise
        reason = " ".join(str(error).split())
        room = free_disk(place) / 2**30
        raise PlugsftError(
            f"{place}: cannot be written: {reason}. {room:.2f} GiB are free there; "
            "free some, or give another folder (output=...)"
        ) from error


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
    mine = f"{uuid.uuid4().hex[:8]}.{socket.gethostname()}-{os.getpid()}"
    doomed = folder.with_name(f".{folder.name}.{mine}.tmp")
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove what killed processes of this machine left half-built."""
    for path in parent.glob(f".*.{socket.gethostname()}-*.tmp"):
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
                with publish(folder) as building:
                    build(building)
    return folder


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
            json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
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
    if holder.get("host") == socket.gethostname() and not _runs(holder["pid"]):
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


def file_digest(path: Path) -> str:
    """Return a fast checksum of a file's bytes."""
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    except OSError as error:
        raise PlugsftError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
