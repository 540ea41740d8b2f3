"""Mistakes as exceptions, with the words of the command line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ..base.errors import PlugsftError, Stopped
from ..commands.refusals import QUIET, quiet_libraries, refusal_of


@contextmanager
def errors() -> Iterator[None]:
    """Raise what the command line would print, as PlugsftError; never SystemExit."""
    levels = {name: logging.getLogger(name).level for name in QUIET}
    quiet_libraries()
    try:
        yield
    except Stopped as error:
        error.add_note("from Python: train(..., resume=True)")
        raise
    except SystemExit as error:
        raise PlugsftError(f"a plugin or a library ended the program: {error!r}") from error
    except OSError as error:
        raise (refusal_of(error) or error) from error.__cause__
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
