"""The text of a converted recipe, with the other tool's settings as comments."""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...recipe.tables import Checkpoint, Data, Eval, Model, Recipe, Table, Train
from ..bundled_recipes import POINTER
from .conversion import Conversion, Line, printable

TABLES: dict[str, type[Table]] = {
    "": Recipe,
    "model": Model,
    "data": Data,
    "eval": Eval,
    "train": Train,
    "checkpoint": Checkpoint,
}
"""The tables of a recipe, in order."""


def recipe_text(conversion: Conversion, name: Path) -> str:
    """Return the whole recipe."""
    lines = [POINTER.strip(), *_head(conversion, name), ""]
    for table in TABLES:
        lines += _table(table, _direct(conversion.lines, f"{table}." if table else ""))
    for plugin in dict.fromkeys(key.split(".")[1] for key in conversion.lines if "plugins." in key):
        lines += _table(f"plugins.{plugin}", _direct(conversion.lines, f"plugins.{plugin}."))
    return "\n".join([*lines[:-1], *_tail(conversion)]) + "\n"


def _head(conversion: Conversion, name: Path) -> Iterator[str]:
    source = printable(conversion.path.name)
    yield f"# Converted by plugsft from {source}, which is for {conversion.tool}."
    yield "# The comments hold its settings."
    yield "#"
    yield f"#   plugsft check {name}"
    yield f"#   plugsft inspect {name}      # the tokens that are trained"
    yield f"#   {launch_line(conversion, name)}"


def launch_line(conversion: Conversion, name: Path) -> str:
    """Return the command that trains."""
    if conversion.gpus == 1 and not conversion.launcher:
        return f"plugsft {name}"
    strategy = f" --strategy {conversion.launcher}" if conversion.launcher else ""
    return f"plugsft launch {name} --ranks {conversion.gpus}{strategy}"


def _direct(lines: dict[str, Line], prefix: str) -> dict[str, Line] | None:
    """Return the lines directly in a table, its own line as ""; None if it has none at all."""
    inside = {
        key.removeprefix(prefix): line for key, line in lines.items() if key.startswith(prefix)
    }
    own = {key: line for key, line in inside.items() if "." not in key}
    if bare := lines.get(prefix.rstrip(".")):
        return {"": bare, **own}
    return own if inside else None


def _table(name: str, lines: dict[str, Line] | None) -> Iterator[str]:
    if lines is None:
        return
    bare = lines.pop("", None)
    if name:
        yield _with_comment(f"[{name}]", bare.comment if bare else "")
    tables = {key: line for key, line in lines.items() if _is_tables(line.value)}
    order = [*TABLES[name].model_fields] if name in TABLES else []
    plain = (key for key in lines if key not in tables)
    for key in sorted(plain, key=lambda key: _place(key, order)):
        yield _with_comment(f"{key} = {spell(lines[key].value)}", lines[key].comment)
    yield ""
    for key, line in tables.items():
        for table in line.value:
            yield _with_comment(f"[[{name}.{key}]]", line.comment)
            yield from (f"{inner} = {spell(value)}" for inner, value in table.items())
            yield ""


def _place(key: str, order: list[str]) -> int:
    return order.index(key) if key in order else len(order)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _with_comment(text: str, comment: str) -> str:
    return f"{text.ljust(32)} # {printable(comment)}" if comment else text


def _tail(conversion: Conversion) -> Iterator[str]:
    if conversion.left:
        yield ""
        yield f"# Settings of {conversion.tool} that are not converted:"
        yield from (printable(f"#   {line}") for line in left_lines(conversion))
    if conversion.same:
        yield ""
        yield "# Settings that need no line of their own:"
        names = printable(", ".join(conversion.same))
        yield from textwrap.wrap(names, 100, initial_indent="#   ", subsequent_indent="#   ")


def left_lines(conversion: Conversion) -> Iterator[str]:
    """Yield a line for each key that is not converted: key, value and reason."""
    for key, reason in conversion.left.items():
        yield printable(f"{key} = {conversion.shown(key)}: {reason}")


def spell(value: Any) -> str:
    """Return a value as TOML writes it, in one line."""
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {spell(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(spell, value))}]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _key(key: Any) -> str:
    text = str(key)
    return text if text.replace("_", "").replace("-", "").isalnum() else spell(text)
