"""Errors on their way to another process."""

import pickle
import traceback

from .errors import PlugsftError


def sendable(error: BaseException, where: str) -> BaseException:
    """Return an error that another process can raise; a pickle has no traceback, so a note does."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a plugin's error holds
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, PlugsftError | KeyboardInterrupt):
        error.add_note(f"{where}:\n{trace}")
    return error
