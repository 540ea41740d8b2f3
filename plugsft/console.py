"""What a person sees: one clean line per event, bars on a terminal, and silence on other ranks."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Soft wrap: a line is never broken where it is read by a program. No emoji: ":100:" is a row.
out = Console(
    soft_wrap=True, highlight=False, emoji=False, quiet=os.environ.get("RANK", "0") != "0"
)
err = Console(soft_wrap=True, highlight=False, emoji=False, stderr=True)


def say(text: str) -> None:
    """Print one line, on the main process only."""
    out.print(text, markup=False)


def complain(text: str) -> None:
    """Print an error, on whichever process has it."""
    err.print(text, markup=False, style="red" if err.is_terminal else "")


def is_terminal() -> bool:
    """Tell whether a person watches."""
    return sys.stdout.isatty() and not out.quiet


@contextmanager
def progress(label: str, total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
    """Give `advance(by, note)`: a bar on a terminal, nothing otherwise."""
    if not is_terminal():
        yield lambda by, note: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit}  {{task.fields[note]}}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, transient=True) as bars:
        task = bars.add_task(label, total=total, note="")
        yield lambda by, note: bars.update(task, advance=by, note=note)
