"""A recipe with other values: its text stays as a person wrote it, but for what is set."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from ...base.atomic import write_text
from ...base.checksums import digest
from ...base.errors import RecipeError
from ..trials.runner import changed

MARK = "# Written by plugsft tune, which replaces it as long as nobody changes it: "
VALUE = r"""("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|\[[^\]]*\]|[^\s,#}"'\[][^,#}\n]*?)"""


def ensure_free(recipe: Path, to: Path | None) -> Path:
    """Return where the new recipe goes; refuse what is there and not ours, or is the old one."""
    target = to or recipe.with_suffix(".tuned.toml")
    if target.resolve() == recipe.resolve():
        raise RecipeError(f"--to: {target} is the recipe itself; give another file")
    if not target.parent.is_dir():
        raise RecipeError(f"--to: {target.parent}: no such folder; make it, or give another")
    if target.exists() and body(target) is None:
        raise RecipeError(
            f"--to: {target} was not written by plugsft tune, or was changed since; move it away, "
            "or give another file (--to FILE)"
        )
    return target


def body(path: Path) -> str | None:
    """Return the recipe below the comment that `rewrite` puts first; None, if there is none."""
    try:
        first, _, rest = path.read_text(encoding="utf8").partition("\n")
    except (OSError, ValueError):
        return None
    return rest.partition("\n\n")[2] if first == MARK + digest({"text": rest}) else None


def rewrite(recipe: Path, target: Path, changes: Mapping[str, Any], why: Sequence[str]) -> bool:
    """Write a recipe with {"table.key": value} set and a comment; tell if its text was kept."""
    old = body(recipe)
    text, kept = edited(recipe.read_text(encoding="utf8") if old is None else old, changes)
    rest = "".join(f"# {line}\n" for line in why) + f"\n{text}"
    write_text(target, f"{MARK}{digest({'text': rest})}\n{rest}")
    return kept


def edited(text: str, changes: Mapping[str, Any]) -> tuple[str, bool]:
    """Set keys in the text of a recipe; tell whether all else of it stayed as it was."""
    kept = True
    for place, value in changes.items():
        wanted = changed(tomllib.loads(text), {place: value})
        found = next((way for way in _ways(text, place, value) if _reads(way, wanted)), None)
        kept = kept and found is not None
        text = tomli_w.dumps(wanted) if found is None else found
    return text, kept


def _ways(text: str, place: str, value: Any) -> Iterator[str]:
    """Yield texts in which it may be set, the nicest first; which of them is right, parsing says.

    TOML has many ways to write a key; here each place that looks like one is tried.
    """
    table, _, key = place.rpartition(".")
    if isinstance(value, Mapping):
        yield f"{text.rstrip()}\n\n{tomli_w.dumps(changed({}, {place: value}))}"
        return
    line = tomli_w.dumps({key: value}).strip()
    word = line.partition("=")[2].strip()
    for match in re.finditer(rf"(?<![\w-]){key}\s*=\s*{VALUE}(?=\s*(?:[,#}}]|$))", text, re.M):
        yield text[: match.start(1)] + word + text[match.end(1) :]
    for match in re.finditer(rf"^[ \t]*\[\s*{re.escape(table)}\s*\][^\n]*\n?", text, re.M):
        yield f"{text[: match.end()].rstrip()}\n{line}\n{text[match.end() :]}"
    for match in re.finditer(rf"(?<![\w-]){table.rpartition('.')[2]}\s*=\s*\{{(\s*\}})?", text):
        end = f"{text[: match.start()]}{match[0].partition('{')[0]}{{{line}"
        yield f"{end}{'}' if match[1] else ', '}{text[match.end() :]}"
    yield f"{line}\n{text}" if not table else f"{text.rstrip()}\n\n[{table}]\n{line}\n"


def _reads(text: str, wanted: Mapping[str, Any]) -> bool:
    try:
        return tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        return False
