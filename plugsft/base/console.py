"""Console output: one line per event, progress bars on a terminal, nothing on other ranks."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from .machine import env_number

CONTROLS = dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)
CONTROLS |= {code: 0x2400 + code for code in range(32) if code not in (9, 10)}
TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
CONTROLS |= dict.fromkeys(map(ord, TURNING), 0xFFFD)
"""Control characters, and marks that turn the direction of text -> pictures of them, as many."""


class _Console(Console):
    """Shows control characters of rows and records; a terminal would obey them."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print strings and texts with their control characters made visible."""
        for text in (it for it in objects if isinstance(it, Text)):
            text.plain = text.plain.translate(CONTROLS)
        shown = (it.translate(CONTROLS) if isinstance(it, str) else it for it in objects)
        super().print(*shown, **options)


# Soft wrap: programs that read the output see whole lines. No emoji: ":100:" is a row number.
# In a notebook, lines are plain text too.
_console = partial(_Console, soft_wrap=True, highlight=False, emoji=False, force_jupyter=False)
# A RANK that was left in the environment, without other ranks, silences nothing.
out = _console(quiet="WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0")
err = _console(stderr=True)


def say(text: str) -> None:
    """Print one line, on the main process only."""
    out.print(text, markup=False)


def say_at_once(text: str) -> None:
    """Print a line out of a signal's handler, where buffers may be in use; on the main process."""
    if not out.quiet:
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"\n{text}\n".encode())


def print_error(text: str) -> None:
    """Print an error, on any process."""
    err.print(text, markup=False, style="red")


def is_terminal() -> bool:
    """Tell whether the output is a terminal that this process may write to."""
    return sys.stdout is not None and sys.stdout.isatty() and not out.quiet


def format_count(number: int, word: str) -> str:
    """Return a number with its noun: 1 round, 2,000 rows."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def format_size(count: float) -> str:
    """Format bytes with a unit: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


@contextmanager
def progress(label: str, total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
    """Yield `advance(by, note)`: a progress bar on a terminal, else a line every 30 s."""
    if not is_terminal():
        yield _line_by_line(label, total, unit)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit}  {{task.fields[note]}}"),
        TimeRemainingColumn(),
        console=out,
        transient=True,
    ) as bars:
        task = bars.add_task(label, total=total, note="")
        yield lambda by, note: bars.update(task, advance=by, note=note)


def _line_by_line(label: str, total: int, unit: str) -> Callable[[int, str], None]:
    """Progress for logs."""
    started = printed = time.monotonic()
    interval = env_number("PLUGSFT_PROGRESS_SECONDS", 30)
    done = 0

    def advance(by: int, note: str) -> None:
        nonlocal done, printed
        done += by
        now = time.monotonic()
        if now - printed >= interval and done < total:
            printed = now
            left = timedelta(seconds=round((now - started) * (total / done - 1)))
            say(f"{label}: {done:,} of {total:,} {unit}, {note}, about {left} left")

    return advance
