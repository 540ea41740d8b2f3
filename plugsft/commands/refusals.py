"""Errors of the operating system, and messages of libraries that nobody needs."""

import errno
import logging

from ..base.errors import PlugsftError, reason_of

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of the operating system whose own message is enough."""
QUIET = ("bitsandbytes", "torchao", "torch.utils._pytree")
"""Loggers that warn of packages that no run needs; peft imports these if they are installed."""


def refusal_of(error: OSError) -> PlugsftError | None:
    """Return an operating system's refusal as an error of one line, else None."""
    # An error with notes comes from a plugin or names rows, and needs its traceback.
    if error.errno not in REFUSED or hasattr(error, "__notes__"):
        return None
    refused = PlugsftError(f"{error.filename or 'disk'}: {reason_of(error)}")
    refused.__cause__ = error
    return refused


def quiet_libraries() -> None:
    """Show only errors of the loggers in QUIET."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
