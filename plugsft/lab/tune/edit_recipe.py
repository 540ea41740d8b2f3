"""Write a recipe with other values; its comments and layout stay."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import tomlkit

from ...base.atomic import write_text
from ...base.checksums import digest
from ...base.errors import RecipeError
from ...recipe.read import FORMATS, read
from ..trials.runner import with_changes

MARK = "# Written by plugsft tune, which replaces it as long as nobody changes it: "


def ensure_free(recipe: Path, to: Path | None) -> Path:
    """Return the path of the new recipe; refuse the recipe itself and files of the user."""
    target = to or recipe.with_suffix(".tuned.toml")
    if target.resolve() == recipe.resolve():
        raise RecipeError(f"--to: {target} is the recipe itself; name another file")
    if not target.parent.is_dir():
        raise RecipeError(f"--to: {target.parent}: no such folder; create it, or name another")
    if target.exists() and read_body(target) is None:
        raise RecipeError(
            f"--to: {target} was not written by plugsft tune, or was changed since; move it away, "
            "or name another file (--to FILE)"
        )
    return target


def read_body(path: Path) -> str | None:
    """Return the recipe below our comment; None if the file is not as we wrote it."""
    try:
        first, _, rest = path.read_text(encoding="utf8").partition("\n")
    except (OSError, ValueError):
        return None
    return rest.partition("\n\n")[2] if first == MARK + digest({"text": rest}) else None


def write_edited(
    recipe: Path, target: Path, changes: Mapping[str, Any], comments: Sequence[str]
) -> bool:
    """Write a recipe with {"table.key": value} set; return whether its comments stayed."""
    own = read_body(recipe)
    if recipe.suffix in FORMATS:  # YAML or JSON: the new recipe is TOML
        text, complete = tomli_w.dumps(with_changes(read(recipe), changes)), False
    else:
        text, complete = edit(recipe.read_text(encoding="utf8") if own is None else own, changes)
    body = "".join(f"# {line}\n" for line in comments) + f"\n{text}"
    write_text(target, f"{MARK}{digest({'text': body})}\n{body}")
    return complete


def edit(text: str, changes: Mapping[str, Any]) -> tuple[str, bool]:
    """Set keys in the text of a recipe; return whether its comments stayed."""
    wanted = with_changes(tomllib.loads(text), changes)
    document = tomlkit.parse(text)
    for dotted_key, value in changes.items():
        *path, key = dotted_key.split(".")
        table: Any = document
        for name in path:
            if name not in table:
                # A super table has no header of its own: [plugins.lora] needs no [plugins].
                table[name] = tomlkit.table(is_super_table=isinstance(value, Mapping))
            table = table[name]
        table[key] = value
    edited = tomlkit.dumps(document)
    complete = tomllib.loads(edited) == wanted
    return (edited if complete else tomli_w.dumps(wanted)), complete
