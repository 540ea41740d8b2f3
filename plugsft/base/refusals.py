"""Errors of the operating system, and messages of libraries that nobody needs."""

import errno
import logging
from importlib.metadata import distributions
from traceback import extract_tb

from .errors import PlugsftError, reason_of

REFUSED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.EIO, errno.ESTALE, errno.EBUSY, errno.ENOTEMPTY),  # of a file server
)
"""Errors of the operating system whose own message is enough."""
QUIET = ("bitsandbytes", "torchao", "torch.utils._pytree")
"""Loggers that warn of packages that no run needs; peft imports these if they are installed."""


def refusal_of(error: Exception) -> PlugsftError | None:
    """Return an operating system's refusal, or a broken package, as an error of one line."""
    if any("importlib/metadata" in frame.filename for frame in extract_tb(error.__traceback__)):
        return _broken_package()
    if not isinstance(error, OSError):
        return None
    # An error with notes comes from a plugin or names rows, and needs its traceback.
    if error.errno not in REFUSED or hasattr(error, "__notes__"):
        return None
    refused = PlugsftError(f"{error.filename or 'disk'}: {reason_of(error)}")
    refused.__cause__ = error
    return refused


def _broken_package() -> PlugsftError | None:
    """Name an installed package whose metadata no library can read: pydantic reads all."""
    for package in distributions():
        try:
            # What is left of a removed package may have no name, which only this one needs.
            _ = package.entry_points, package.metadata, getattr(package, "_normalized_name", "")
        except Exception as error:  # importlib passes on all errors of its parsers
            return PlugsftError(
                f"{getattr(package, '_path', package)}: the metadata of this package is broken "
                f"({reason_of(error)}); install it again, or remove the folder"
            )
    return None


def quiet_libraries() -> None:
    """Show only errors of the loggers in QUIET."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
