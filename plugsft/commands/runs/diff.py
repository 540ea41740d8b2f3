"""`plugsft diff`: print the differences of two runs, and their results."""

from pathlib import Path

from rich.text import Text

from ...base.console import out, say
from ...base.errors import PlugsftError
from .compare import Row, Section, compare, read_run

NARROW, WIDE = 12, 36
"""Least and most characters of a column; a longer value has a line of its own."""


def diff(first: Path, second: Path) -> None:
    """Print the differences of two runs."""
    a, b = read_run("A", first), read_run("B", second)
    if first.samefile(second):
        raise PlugsftError(f"{second}: is the same run; name another run's output folder")
    sections = compare(a, b)
    for run in (a, b):
        out.print(Text.assemble((run.name, "bold"), f"  {run.folder}: {run.state}"))
    for note in a.notes + b.notes:
        say(f"note: {note}")
    for section in sections:
        if not section.same:
            _print(section)
    if same := [section.title for section in sections if section.same]:
        say(f"\nthe same: {', '.join(same)}")


def _print(section: Section) -> None:
    """Print two values in a line, or long ones below each other."""
    short = [row for row in section.rows if max(len(row.a), len(row.b)) <= WIDE]
    name = max(len(row.name) for row in [*section.rows, Row(section.title, "", "")])
    width = max([NARROW, *(len(text) for row in short for text in (row.a, row.b))])
    head = f"{section.title:<{name}}  {'A':<{width}}  B" if short else section.title
    out.print(Text(f"\n{head}", "bold"))
    for row in section.rows:
        if row in short:
            line = f"{row.name:<{name}}  {row.a:<{width}}  {row.b:<{width}}  {row.change}".rstrip()
        else:
            line = f"{row.name:<{name}}  A: {row.a}\n{'':<{name}}  B: {row.b}"
        out.print(Text(line))
    for line in section.lines:
        say(line)
