"""A cache entry that all ranks build together, for plugins."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..base.build_once import once
from .agree import Ranks, agreed, from_main, is_known_to_all
from .failures import PeerError, describe_failure

BUILD, CACHED, FAILED = "build", "cached", "failed"
"""Messages of the main process to the other ranks."""


def artefact(
    ranks: Ranks,
    key: dict[str, Any],
    build: Callable[[Path | None], None],
    read: Callable[..., Any],
) -> Any:
    """Return `read` of the cache entry of a key; build the entry if it is missing.

    All ranks build together: the main process with the folder, the others with None. A build
    that all of them left together, as its disk is full, may begin again in another place.

    The main process alone asks for the entry, and tells the others what to do: to join a build,
    to end with its error, or to take what it has read.
    """
    with agreed("opening an artefact"):
        pass
    if ranks.rank:
        return _build_with_main(build)
    failed: list[Exception] = []

    def fill(folder: Path) -> None:
        if failed:
            raise failed[0]
        from_main((BUILD, None))
        try:
            build(folder)
        except Exception as error:
            if ranks.size > 1 and not is_known_to_all(error):
                failed.append(error)  # the others are still in `build`
            raise

    try:
        value = ranks.hooks.cache(key=key, build=partial(once, fill=fill), read=read)
    except Exception as error:
        if not failed:
            from_main((FAILED, describe_failure(error)))
        raise
    return from_main((CACHED, value))[1]


def _build_with_main(build: Callable[[Path | None], None]) -> Any:
    """Join each build of the main process; return its value."""
    own: Exception | None = None
    while True:
        message, value = from_main()
        if message == CACHED:
            return value
        if message == FAILED:
            raise own or PeerError(f"rank 0 failed: {value}")
        try:
            build(None)
        except Exception as error:
            if not is_known_to_all(error):
                raise  # ends the run: `ending_together`
            own = None if isinstance(error, PeerError) else error
