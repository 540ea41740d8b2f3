"""Mistakes as exceptions, with the words of the command line."""

import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..base.errors import LaunchError, PlugsftError
from ..base.for_commands import quiet_libraries, refusal_of

PathLike = str | Path
RecipeLike = PathLike | Mapping[str, Any]
PluginsLike = Sequence[object] | Mapping[str, Any]

ARGUMENTS = {
    "overwrite": "overwrite=True",
    "resume": "resume=True",
    "resume-auto": 'resume="auto"',
    "resume-from": "resume_from=...",
    "without": "without=[...]",
}
"""Option of the command line -> argument of `plugsft.api.train`."""
OPTION = re.compile(r"--(overwrite|resume-auto|resume-from|resume|without)\b")


@contextmanager
def alone(lock: threading.Lock) -> Iterator[None]:
    """Refuse a second block at the same time: a run changes settings of the whole process."""
    if not lock.acquire(blocking=False):
        raise LaunchError(
            "another run is in progress in this process; wait for its end, or start this one in "
            "a process of its own"
        )
    try:
        yield
    finally:
        lock.release()


def ensure_kind(name: str, value: object, kinds: Any, cure: str) -> None:
    """Refuse an argument of another kind; True is no number."""
    if not isinstance(value, kinds) or (kinds is int and isinstance(value, bool)):
        raise PlugsftError(f"{name}={value!r}: give {cure}")


@contextmanager
def errors() -> Iterator[None]:
    """Raise what the command line would print, as PlugsftError; never SystemExit.

    A message that names options gets a note with the arguments of `train`.
    """
    quiet_libraries()
    try:
        with warnings.catch_warnings():
            # tqdm warns in a notebook without widgets, which plain lines do not need.
            warnings.filterwarnings("ignore", "IProgress not found")
            yield
    except PlugsftError as error:
        options = OPTION.findall(str(error))
        if options and not hasattr(error, "__notes__"):
            calls = (f"train(..., {ARGUMENTS[option]})" for option in dict.fromkeys(options))
            error.add_note(f"from Python: {' or '.join(calls)}")
        raise
    except SystemExit as error:
        raise PlugsftError(f"a plugin or a library ended the program: {error!r}") from error
    except OSError as error:
        raise (refusal_of(error) or error) from error.__cause__
