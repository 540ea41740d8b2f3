"""Copy rows from object stores (s3://, gs://, hf://) to disk, where every run finds them.

Rows were read in place once, by ranges: tokens on disk take as much room as rows, so that saved
half of it at most. Files of web servers are refused: fsspec does not see that one has changed.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import fsspec
from fsspec.callbacks import Callback

from ..base.atomic import replace_file, sweep, sync, write_text, writing
from ..base.console import format_count, format_size, progress, say
from ..base.errors import DataError, DiskError, PlugsftError
from ..base.limits import path_inside
from ..base.machine import free_disk
from ..recipe.tables import DATA_FILES

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Scheme -> the extra of plugsft that reads it."""
SCHEMES = (*EXTRAS, "hf", "file")
"""Stores that are asked. Others, and chains (zip://a::http://b), would ask any server."""
VERSIONS = ("etag", "last-modified", "lastmodified", "mtime", "updated", "md5hash", "blob_id")
"""What an object store says of an object's content, in small letters; the first is taken."""


class Object(NamedTuple):
    """An object of a store, and the name of its copy."""

    path: str
    name: str
    size: int
    version: str
    """What the store says of its size and content."""


class Counting(Callback):  # type: ignore[misc]  # untyped upstream
    """Tells of the bytes that a store gives."""

    def __init__(self, advance: Callable[[int, str], None]) -> None:
        super().__init__()
        self._advance = advance

    def relative_update(self, inc: int = 1) -> None:
        """Count some bytes."""
        self._advance(inc, "")


def fetch(address: str, folder: Path) -> None:
    """Copy the objects of an address, a folder or a pattern, but those that were copied before."""
    if address.partition("://")[0] not in SCHEMES or "::" in address:
        raise DataError(
            f"{address}: only addresses of {', '.join(SCHEMES)} are fetched; download the file "
            "(curl -O), and name it. A recipe names local files and folders, and data sets of the "
            "hub, as they are"
        )
    with refusals_of(address):
        store, path = fsspec.core.url_to_fs(address, use_listings_cache=False)
        objects = find_objects(store, path)
        missing = [each for each in objects if not is_fetched(each, folder)]
    if not objects:
        raise DataError(f"{address}: no object with rows, whose name ends {', '.join(DATA_FILES)}")
    need = sum(each.size for each in missing)
    free = free_disk(folder.absolute())
    if need > free:
        needed = f"{folder}: {format_size(need)} needed, {format_size(free)} free"
        raise DiskError(needed, "free some, or name another folder")
    with progress("fetching", need, "bytes") as advance:
        count = Counting(advance)
        for each in missing:
            with refusals_of(address), writing(folder / each.name):
                copy(store, each, folder, count)
    copied = format_count(len(missing), "file")
    there = len(objects) - len(missing)
    say(f"fetched: {copied}, {format_size(need)}; {there:,} there before")
    rows = folder / objects[0].name if len(objects) == 1 else folder
    say(f'in a recipe: source = "{rows}"')


def find_objects(store: Any, path: str) -> list[Object]:
    """Find the objects at a path, in its folder or of its pattern, that hold rows; name others."""
    start = path
    if re.search(r"[*?[]", path) and not store.exists(path):
        infos = store.glob(path, detail=True)
        start = re.split(r"[*?[]", path)[0].rpartition("/")[0]
    else:  # a name may hold these letters itself
        infos = store.find(path, detail=True) or {path: store.info(path)}  # says if it is missing
    objects, others = [], []
    for found, info in sorted(infos.items()):
        name = os.path.relpath(found, os.path.dirname(found) if found == path else start)
        if not name.endswith(DATA_FILES) or not info["size"]:
            others.append(name)
            continue
        if info.get("islink"):  # a folder tells the time of the link itself
            info = store.info(found)
        objects.append(Object(found, name, info["size"], version_of(info)))
    if others:
        say(f"left out, as empty or of another type: {shorten(', '.join(others), 300)}")
    return objects


def version_of(info: Mapping[str, Any]) -> str:
    """Name the size of an object, and what else a store says of its content."""
    facts = {key.lower(): value for key, value in info.items()}
    content = [facts[name] for name in VERSIONS if name in facts]
    return " ".join(map(str, [facts["size"], *content[:1]]))


def is_fetched(each: Object, folder: Path) -> bool:
    """Tell whether the copy of an object is there; refuse a file that is none."""
    path = path_inside(folder, each.name)
    if not os.path.lexists(path):
        return False
    with suppress(OSError):
        if version_file(path).read_text() == each.version and path.stat().st_size == each.size:
            return True
    raise DataError(f"{path}: is there, and is no copy of {each.path} as it is now; remove it")


def version_file(path: Path) -> Path:
    """Return the file beside a copy that holds its version."""
    return path.with_name(f".{path.name}.version")


def copy(store: Any, each: Object, folder: Path, count: Callback) -> None:
    """Copy an object; its store tries again what a cut connection has stopped."""
    path = path_inside(folder, each.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    with replace_file(path) as temporary:
        store.get_file(each.path, str(temporary), callback=count)
        size = temporary.stat().st_size
        if size != each.size or version_of(store.info(each.path)) != each.version:
            raise DataError(f"{each.path}: has changed while it was copied; start again")
        sync(temporary)
        write_text(version_file(path), each.version)


@contextmanager
def refusals_of(address: str) -> Iterator[None]:
    """Turn what a store refuses into one line with the cure; each has errors of its own."""
    scheme = address.partition("://")[0]
    try:
        yield
    except (PlugsftError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or "no reason given"
        if isinstance(error, ImportError):
            cure = f"pip install plugsft[{EXTRAS[scheme]}]" if scheme in EXTRAS else text
            text = f"its store needs another package: {cure}"
        elif isinstance(error, FileNotFoundError) or getattr(error, "code", None) == 404:
            text = f"no such bucket, folder or object ({text})"
        elif isinstance(error, PermissionError) or "Credential" in type(error).__name__:
            text = f"no access ({text}); set the store's credentials: AWS_ACCESS_KEY_ID and others"
        raise DataError(f"{address}: {text}") from error
