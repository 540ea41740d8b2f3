"""The text of a converted recipe, with the other tool's settings as comments."""

from pathlib import Path
from typing import Any

import tomli_w

from ...base.errors import RecipeError
from ..starting_files import POINTER
from .conversion import Conversion, printable

TABLES = ("model", "data", "eval", "train", "checkpoint", "plugins")
"""The tables of a recipe, in order."""


def recipe_text(c: Conversion, name: Path) -> str:
    """Return the whole recipe."""
    tables: dict[str, Any] = {table: {} for table in TABLES}
    for key, line in c.lines.items():
        *above, option = key.split(".")
        table = tables
        for each in above:
            table = table.setdefault(each, {})
        table[option] = line.value
    try:
        text = tomli_w.dumps({key: table for key, table in tables.items() if table})
    except TypeError as error:
        raise RecipeError(f"{c.path}: a list or table has an empty value; set it") from error
    lines = [
        POINTER.strip(),
        f"# Converted by plugsft from {printable(c.path.name)}, which is for {c.tool}.",
        "# The comments hold its settings.",
        "#",
        f"#   plugsft check {name}",
        f"#   plugsft inspect {name}      # the tokens that are trained",
        f"#   {launch_line(c, name)}",
        "",
        *_with_comments(c, text),
    ]
    if c.left:
        lines += ["", f"# Settings of {c.tool} that are not converted:"]
        lines += [f"#   {line}" for line in left_lines(c)]
    return "\n".join(lines) + "\n"


def launch_line(c: Conversion, name: Path) -> str:
    """Return the command that trains."""
    if c.gpus == 1 and not c.launcher:
        return f"plugsft {name}"
    strategy = f" --strategy {c.launcher}" if c.launcher else ""
    return f"plugsft launch {name} --ranks {c.gpus}{strategy}"


def left_lines(c: Conversion) -> list[str]:
    """Return a line for each key that is not converted: key, value and reason."""
    return [printable(f"{key} = {c.shown(key)}: {reason}") for key, reason in c.left.items()]


def _with_comments(c: Conversion, text: str) -> list[str]:
    """Return the lines of a recipe, each with the settings that it comes from."""
    lines, table = [], ""
    for line in text.strip().split("\n"):
        if line.startswith("["):
            table = line.strip("[]")
        name = line.partition(" = ")[0]
        key = table if line.startswith("[") else f"{table}.{name}" if table else name
        comment = printable(c.lines[key].comment) if key in c.lines else ""
        lines.append(f"{line.ljust(32)} # {comment}" if comment else line)
    return lines
