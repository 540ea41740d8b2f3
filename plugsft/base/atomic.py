"""Folders that appear whole or not at all, and are built by exactly one of many processes."""

import errno
import itertools
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from .checksums import digest, file_digest
from .errors import DiskError, PlugsftError
from .limits import parse_json, read_text
from .machine import free_disk

MANIFEST = "manifest.json"
PARTS = "data-*"
"""Finished files of a dead builder, which the next builder uses."""
STALE = 86_400
"""Seconds after which other machines' unfinished builds are removed."""


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
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
"""Errors of writes to an open file, for which Python names no file."""
FULL = (errno.ENOSPC, errno.EDQUOT)
NUMBER = re.compile(r"(?:\(os error |\[Errno )(\d+)")
"""The system's error number in the text of an error, from Rust and from shutil."""

Stands = Callable[[Path], bool]
"""Whether a folder may stay as it is."""
Stamp = tuple[int, str]
"""A file's size and checksum."""


@contextmanager
def publish(
    folder: Path, replace: bool = False, stamps: Mapping[str, Stamp] | None = None
) -> Iterator[Path]:
    """Yield a temporary folder to fill; then sync it, and give it its real name.

    `stamps` are for files that other processes wrote and synced; filled in before the end.
    """
    building = folder.with_name(f".{folder.name}.{HERE}-{os.getpid()}.tmp")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            yield building
            finish(
                building, folder, lambda there: not replace and is_published(there), stamps or {}
            )
        finally:
            shutil.rmtree(building, ignore_errors=True)


def finish(
    building: Path, folder: Path, stands: Stands, stamps: Mapping[str, Stamp] | None = None
) -> None:
    """Give a built folder its real name, unless the folder of that name may stay."""
    known = stamps or {}
    for half in building.rglob(".*.tmp"):
        remove(half)
    files = [path for path in sorted(building.rglob("*")) if path.is_file()]
    manifest = dict(known)
    for path in files:
        name = str(path.relative_to(building))
        if name not in known:
            manifest[name] = stamp(path)
        elif path.stat().st_size != known[name][0]:
            raise DiskError(f"{path}: its size is not the one that was written", "try again")
    if missing := {*known} - {str(path.relative_to(building)) for path in files}:
        raise DiskError(
            f"{building}: {min(missing)}, which another rank wrote, is missing",
            "all nodes must write to one file system",
        )
    write_text(building / MANIFEST, json.dumps(manifest, indent=1))
    for path in [*building.rglob("*"), building]:
        if str(path.relative_to(building)) not in known:
            sync(path)
    if folder.exists() and not stands(folder):
        discard(folder)
    try:
        building.rename(folder)
    except OSError:
        # The loser of a race finds the name taken by an equal folder: its own copy goes.
        if not is_published(folder):
            raise
        remove(building)
    sync(folder.parent)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn a failure to write there into one line with the reason and the free space.

    Errors of plugins called inside, and of files elsewhere, pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, PlugsftError) or not _concerns(error, place):
            raise
        # A copy of several files fails with a list of their errors.
        several = isinstance(error, shutil.Error)
        reason = " ".join(str(error.args[0][0][2] if several else error).split())
        cure = "give another folder (output=...)"
        if _errno(error, reason) in FULL:
            room = free_disk(place) / 2**20
            shown = f"{room:.0f} MiB" if room < 1024 else f"{room / 1024:.2f} GiB"
            reason = f"the disk is full ({shown} are free): {reason}"
            cure = f"free some, or {cure}"
        raise DiskError(f"{place}: cannot be written: {reason}", cure) from error


def _errno(error: Exception, reason: str) -> int | None:
    """Return the system's error number: the exception's own, or the one in a library's text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if match := NUMBER.search(reason):
        return int(match[1])
    # torch reports a full disk only in these words.
    return errno.ENOSPC if "unexpected pos" in reason else None


def _concerns(error: Exception, place: Path) -> bool:
    """Tell whether an error is about writing to a path or its folder."""
    if not isinstance(error, OSError):
        return any(sign in str(error) for sign in FOREIGN)
    if isinstance(error, shutil.Error):
        return str(place.parent) in str(error)
    if error.filename is None:
        return error.errno in DISK
    there, place = (Path(os.path.abspath(os.fsdecode(one))) for one in (error.filename, place))
    return there.is_relative_to(place.parent) or place.is_relative_to(there)


def is_published(folder: Path) -> bool:
    """Tell whether a folder was published, without reading its files."""
    return (folder / MANIFEST).is_file()


def is_whole(folder: Path) -> bool:
    """Tell whether a folder was published and is undamaged, by a quick check."""
    return is_published(folder) and damage(folder, quick=True) is None


def damage(
    folder: Path,
    quick: bool = False,
    share: tuple[int, int] = (0, 1),
    names: Container[str] | None = None,
) -> str | None:
    """Compare a published folder with its manifest; return what is wrong, or None.

    `quick` compares all sizes, but only the bytes of *.json. With a `share` (rank, ranks) each rank
    compares its own files, about as many bytes as the others. `names` limits it to these files.
    """
    rank, ranks = share
    try:
        manifest = parse_json(read_text(folder / MANIFEST))
        if not manifest:
            return "its manifest lists no file"
        total, before = sum(size for size, _ in manifest.values()), 0
        for name, (size, checksum) in sorted(manifest.items()):
            middle, before = before + size / 2, before + size
            elsewhere = total and int(middle * ranks / total) != rank
            if elsewhere or (names is not None and name not in names):
                continue
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


def listing(folder: Path) -> dict[str, int] | None:
    """Return a manifest's files with their sizes; None if plugsft wrote no manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf8"))
        return {str(name): _size_in(entry) for name, entry in manifest.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def foreign(folder: Path, sized: bool = False) -> list[Path]:
    """Return files that plugsft did not write; if `sized`, also those of another size."""
    if not folder.is_dir():
        return [folder] if folder.exists() else []
    files = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    known = listing(folder)
    if known is None:
        return files
    sizes = {folder / name: size for name, size in known.items()}
    return [
        path
        for path in files
        if path != folder / MANIFEST
        and (path not in sizes or (sized and path.stat().st_size != sizes[path]))
    ]


def discard(folder: Path, sized: bool = True) -> Path | None:
    """Remove a folder that plugsft wrote, at once for readers; return the rest, if any.

    Files that plugsft did not write are moved to `FOLDER.not-ours-1`; if `sized`, also files of
    another size. Files that cannot be removed stay, too.
    """
    if not folder.is_symlink() and foreign(folder, sized):
        return _leave_foreign(folder, sized)
    mine = f"{uuid.uuid4().hex[:8]}.{HERE}-{os.getpid()}"
    doomed = folder.with_name(f".{folder.name}.{mine}.tmp")
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    remove(doomed)
    return doomed if doomed.exists() else None


def _leave_foreign(folder: Path, sized: bool) -> Path:
    """Rename a folder, and remove the files that plugsft wrote in it."""
    numbers = (folder.with_name(f"{folder.name}.not-ours-{n}") for n in itertools.count(1))
    aside = next(path for path in numbers if not path.exists())
    folder.rename(aside)
    if (known := listing(aside)) is not None:
        theirs = foreign(aside, sized)
        for path in (*(aside / name for name in known), aside / MANIFEST):
            if path not in theirs:
                path.unlink(missing_ok=True)
    return aside


def sweep(parent: Path, names: Sequence[str] = ("*",)) -> None:
    """Remove unfinished builds of dead processes; other machines' after a day."""
    for path in [path for name in names for path in parent.glob(f".{name}.tmp")]:
        pid = path.name.removesuffix(".tmp").rpartition("-")[2]
        with suppress(OSError):
            if f".{HERE}-" in path.name and pid.isdigit():
                gone = not runs(int(pid))
            else:
                times = (inner.lstat().st_mtime for inner in [path, *path.rglob("*")])
                gone = time.time() - max(times) > STALE
            if gone:
                remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: readers find the old text or the new."""
    with writing(path), replace_file(path) as half:
        half.write_text(text, encoding="utf8")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; then give the file its real name."""
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield half
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def runs(pid: int) -> bool:
    """Tell whether a process of this machine is alive."""
    # A killed process whose parent has not looked yet is a zombie: it has a number, and no life.
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stamp(path: Path) -> Stamp:
    """Return a file's size and checksum, as a manifest lists it."""
    return (path.stat().st_size, file_digest(path))


def _size_in(entry: Any) -> int:
    """Return the size in a manifest's entry; raise ValueError if plugsft did not write it."""
    match entry:
        case [int(size), str(checksum)] if re.fullmatch("[0-9a-f]{32}", checksum):
            return size
    raise ValueError("not an entry of a manifest of plugsft")


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
