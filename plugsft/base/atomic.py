"""Files and folders that appear whole or not at all, with a manifest of sizes and checksums."""

import errno
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from .checksums import digest, file_digest
from .console import format_size
from .errors import DISK_FULL, DiskError, PlugsftError, reason_of
from .limits import parse_json, path_inside, read_text
from .machine import free_disk

MANIFEST = "manifest.json"
FINISHED_FILES = "data-*"
"""Files of a dead builder that the next builder uses."""
STALE_SECONDS = 86_400
"""Age at which other machines' unfinished builds are removed."""
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}-(\d+)\.tmp")
"""A temporary name of any machine; no other program makes such names."""
WRITE_ERRORS = (*DISK_FULL, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
"""Errors of writes to an open file, for which Python names no file."""
ERROR_NUMBER = re.compile(r"(?:\(os error |\[Errno )(\d+)")
"""The system's error number in the text of an error, from Rust and from shutil."""
OF_CHECKPOINTS = re.compile(r"rank-[0-9]+-[0-9]+\.safetensors|state\.json|manifest\.json")
"""Files of a checkpoint, which are plugsft's also where its manifest is lost."""


def _host_id() -> str:
    """Identify this boot of this machine, and the container whose process numbers we see."""
    ids = {}
    with suppress(OSError):
        ids["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text()
        ids["container"] = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{socket.gethostname()}.{digest(ids)[:8]}"


HOST_ID = _host_id()

IsComplete = Callable[[Path], bool]
"""Whether a folder needs no (new) build."""
Stamp = tuple[int, str]
"""A file's size and checksum."""


@contextmanager
def publish(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to fill; then sync it, and give it its real name."""
    with writing(folder):
        building = begin_folder(folder)
        try:
            yield building
            finish(building, folder, lambda old: not replace and is_published(old))
        finally:
            shutil.rmtree(building, ignore_errors=True)


def begin_folder(folder: Path) -> Path:
    """Make a temporary folder beside one; `finish` gives it the real name."""
    building = folder.with_name(f".{folder.name}{temporary_ending()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    return building


def finish(
    building: Path, folder: Path, is_complete: IsComplete, stamps: Mapping[str, Stamp] = {}
) -> None:
    """Write a built folder's manifest, and rename it; `is_complete` may keep the old folder.

    `stamps` are of files that other processes wrote and synced.
    """
    for unfinished in building.rglob(".*.tmp"):
        remove(unfinished)
    others = {building / name: size for name, (size, _) in stamps.items()}
    for path, size in others.items():
        if not path.is_file() or path.stat().st_size != size:
            raise DiskError(
                f"{path}: is missing or cut short, and another rank wrote it",
                "all nodes must write to one file system",
            )
    files = {path for path in building.rglob("*") if path.is_file()}
    own = {str(path.relative_to(building)): stamp(path) for path in files - others.keys()}
    manifest = json.dumps({**stamps, **own}, indent=1, sort_keys=True)
    write_text(building / MANIFEST, manifest)
    # Libraries write some files for their owner alone, whatever the umask.
    mode = (building / MANIFEST).stat().st_mode
    for path in files:
        path.chmod(mode)
    for path in {*building.rglob("*"), building} - others.keys():
        sync(path)
    if folder.exists() and not is_complete(folder):
        discard(folder)
    try:
        building.rename(folder)
    except OSError:
        # Another process was first, and its folder is equal.
        if not is_published(folder):
            raise
        remove(building)
    sync(folder.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write to a path into one line with the reason and the free space.

    Errors of plugins in the block, and of other files, pass unchanged.
    """
    try:
        yield
    except Exception as error:
        number = None if isinstance(error, PlugsftError) else _error_number(error, path)
        if number is None:
            raise
        reason, cure = reason_of(OSError(number, "")), "name another folder"
        if number in DISK_FULL:
            reason += f" ({format_size(free_disk(path))} are free)"
            cure = f"free some, or {cure}"
        if number in (errno.ENOTDIR, errno.EEXIST):
            existing = next(it for it in (path, *path.parents) if os.path.lexists(it))
            reason = f"{existing} is not a folder"
        raise DiskError(f"{path}: cannot be written: {reason}", cure) from error


def _error_number(error: Exception, path: Path) -> int | None:
    """Find the system's error number, if an error is about writing to a path or its folder."""
    if not isinstance(error, OSError) or error.errno is None:
        found = ERROR_NUMBER.search(str(error))
        return int(found[1]) if found else None
    if error.filename is None:
        return error.errno if error.errno in WRITE_ERRORS else None
    written = error.filename2 or error.filename  # a copy has two
    failed, path = (Path(os.path.abspath(os.fsdecode(name))) for name in (written, path))
    concerned = failed.is_relative_to(path.parent) or path.is_relative_to(failed)
    return error.errno if concerned else None


def is_published(folder: Path) -> bool:
    """Tell whether a folder was published, without reading its files."""
    return (folder / MANIFEST).is_file()


def is_whole(folder: Path) -> bool:
    """Tell whether a folder was published and is undamaged, by a quick check."""
    return is_published(folder) and damage(folder, quick=True) is None


def read_manifest(folder: Path) -> dict[Path, Stamp]:
    """Read what plugsft wrote into a folder: path -> size and checksum."""
    # Somebody else may have written it, so that it may hold anything: a web app has one, too.
    stamps = {}
    try:
        manifest = parse_json(read_text(folder / MANIFEST))
        for name, (size, checksum) in manifest.items():
            if not (isinstance(size, int) and re.fullmatch("[0-9a-f]{32}", checksum)):
                raise ValueError("plugsft did not write it")
            stamps[path_inside(folder, name)] = size, checksum
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"its manifest cannot be read ({reason_of(error)})") from error
    return stamps


def damage(folder: Path, quick: bool = False, share: tuple[int, int] = (0, 1)) -> str | None:
    """Compare a published folder with its manifest; return what is wrong, or None.

    `quick` compares all sizes, but only the bytes of *.json and *.jinja. `share` is (rank, ranks):
    each rank compares other files, about equal numbers of bytes.
    """
    rank, ranks = share
    try:
        stamps = read_manifest(folder)
        by_size = sorted(stamps.items(), key=lambda item: item[1])
        for path, (size, checksum) in by_size[rank::ranks]:
            if not path.is_file():
                return f"{path.relative_to(folder)} is missing"
            read = not quick or path.suffix in (".json", ".jinja")
            if path.stat().st_size != size or (read and file_digest(path) != checksum):
                return f"{path.relative_to(folder)} is not what was written"
    except (OSError, ValueError) as error:
        return reason_of(error)
    return None if stamps else "its manifest lists no file"


def foreign_files(folder: Path, sized: bool = False) -> list[Path]:
    """Find files that plugsft did not write; with `sized`, also files of another size."""
    if not folder.is_dir():
        return [folder] if folder.exists() else []
    files = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    try:
        stamps = read_manifest(folder)
    except ValueError:
        known = OF_CHECKPOINTS if parse_step(folder) is not None else re.compile("")
        return [path for path in files if not known.fullmatch(path.name)]
    return [
        path
        for path in files
        if path != folder / MANIFEST
        and (path not in stamps or (sized and path.lstat().st_size != stamps[path][0]))
    ]


def discard(folder: Path) -> None:
    """Remove a folder that plugsft wrote, atomically for readers; refuse one with other files.

    No path of a manifest is followed. What a file server keeps, as it is in use, `sweep` removes.
    """
    if not folder.is_symlink() and (others := foreign_files(folder)):
        raise DiskError(
            f"{folder}: cannot be replaced: plugsft did not write {others[0]}, or the manifest of "
            "the folder is damaged",
            "move the folder away",
        )
    removed = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}{temporary_ending()}")
    with suppress(FileNotFoundError):
        folder.rename(removed)
    remove(removed)


def temporary_ending() -> str:
    """End a temporary name: it names this process, so that `sweep` knows when it has died."""
    # Processes of two hosts may have the same number.
    return f".{HOST_ID}-{os.getpid()}.tmp"


def sweep(parent: Path) -> None:
    """Remove what dead processes left under temporary names; other machines' after a day."""
    for path in parent.glob(".*.tmp"):
        match = TEMPORARY.fullmatch(path.name)
        if match is None:
            continue
        with suppress(OSError):
            if f".{HOST_ID}-" in path.name:
                dead = not is_alive(int(match[1]))
            else:
                dead = time.time() - path.lstat().st_mtime > STALE_SECONDS
            if dead:
                remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: readers find the old text or the new."""
    with writing(path), replace_file(path) as temporary:
        temporary.write_text(text, encoding="utf8")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; then give the file its real name."""
    temporary = path.with_name(f".{path.name}{temporary_ending()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Tell whether a process of this machine is alive."""
    # A killed process is a zombie, with a number, until its parent has waited for it.
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stamp(path: Path) -> Stamp:
    """Measure a file as a manifest lists it: its size and checksum."""
    return (path.stat().st_size, file_digest(path))


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def step_folder(checkpoints: Path, step: int) -> Path:
    """Name the folder of the checkpoint after a step."""
    return checkpoints / f"step-{step:06d}"


def parse_step(path: Path) -> int | None:
    """Read the step from the name of a checkpoint folder; None for any other name."""
    match = re.fullmatch(r"step-([0-9]+)", path.name)
    return int(match[1]) if match else None


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """List the checkpoints of a run, in the order of their steps; each may be damaged."""
    found = [path for path in checkpoints.glob("step-*/") if parse_step(path) is not None]
    return sorted(found, key=lambda path: (parse_step(path) or 0, path))
