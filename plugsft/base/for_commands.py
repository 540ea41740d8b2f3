"""What commands alone need: sizes that they read, tables, and one line for a system's refusal."""

import errno
import logging
import re
from collections.abc import Container, Sequence

from .console import CONTROLS, say
from .errors import DISK_FULL, PlugsftError, reason_of

REFUSED = (
    *DISK_FULL,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,  # the rest: of a file server
    errno.ESTALE,
    errno.EBUSY,
    errno.ENOTEMPTY,
)
"""Errors of the operating system whose own message is enough."""
QUIET = ("bitsandbytes", "torchao", "torch.utils._pytree")
"""Loggers that warn of packages that no run needs; peft imports these if they are installed."""
SIZES = "GiB is 2^30 bytes, GB 10^9."
"""The help of each option that reads a size."""
UNITS = {f"{unit}I": 1 << 10 * power for power, unit in enumerate("KMGT", start=1)}
UNITS |= {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def print_table(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> None:
    """Print rows with aligned columns; those of the numbers `right` end at one place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if number in right else text.ljust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())


def parse_size(text: str, option: str = "size") -> int:
    """Return the bytes of "20GiB", "1.5 TB" or "1000000"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in UNITS:
        raise PlugsftError(f"{option}: given '{text}'; write it as 20GiB, 500MB, or in bytes")
    return round(float(match[1]) * UNITS[match[2]])


def refusal_of(error: BaseException) -> PlugsftError | None:
    """Return an operating system's refusal as an error of one line."""
    if not isinstance(error, OSError):
        return None
    # An error with notes comes from a plugin or names rows. But for a full disk, it needs its
    # traceback.
    notes = getattr(error, "__notes__", [])
    if error.errno not in (DISK_FULL if notes else REFUSED):
        return None
    refused = PlugsftError("; ".join([f"{error.filename or 'disk'}: {reason_of(error)}", *notes]))
    refused.__cause__ = error
    return refused


class ShownRecord(logging.LogRecord):
    """A message of a library, which may quote a foreign file, for the terminal."""

    def getMessage(self) -> str:  # logging's name
        """Return the text with its control characters made visible."""
        return super().getMessage().translate(CONTROLS)


def quiet_libraries() -> None:
    """Show only errors of the loggers in QUIET, and no control characters of any."""
    logging.setLogRecordFactory(ShownRecord)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
