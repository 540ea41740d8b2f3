"""Read a recipe file: TOML or YAML; apply overrides."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..base.errors import RecipeError, did_you_mean, reason_of
from ..base.limits import parse_toml, read_text
from .explain import EXAMPLE, explain, value_of
from .schedule_names import cures
from .tables import DATA_FILES, Recipe


def read(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe file and apply `key.path=value` overrides."""
    file, text = Path(path), ""
    form = "YAML" if file.suffix in (".yaml", ".yml") else "TOML"
    if file.suffix in DATA_FILES and file.is_file():
        raise RecipeError(
            f"{path}: is data, not a recipe; write a recipe ({EXAMPLE}), set "
            f'data.source = "{path}" in it, and name the recipe here'
        )
    try:
        text = read_text(file)
        if form == "TOML":
            raw = parse_toml(text)
        else:
            from .read_yaml import parse_yaml  # with its parser

            raw = parse_yaml(text, str(path))
    except OSError as error:
        others = (each.name for each in file.parent.glob("*") if each != file)
        why = f"({reason_of(error)}){did_you_mean(file.name, others)}"
        raise RecipeError(f"{path}: cannot be read {why}") from error
    except ValueError as error:  # from the parser, UTF-8, our limits, and int's limit of digits
        hint = _suggest(text, str(error)) if form == "TOML" else ""
        raise RecipeError(f"{path}: is not {form}: {error}{hint}") from error
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key.strip():
            raise RecipeError(f"'{override}': an override is written key.path=value")
        _put(raw, key.strip().split("."), value_of(text), override)
    return raw


def validate(raw: Mapping[str, Any], path: str | Path) -> tuple[Recipe | None, list[str]]:
    """Check the core's tables; return the recipe, or None and its mistakes."""
    train = raw.get("train")
    if isinstance(train, Mapping):
        if old := [f"{path}: {cure}" for cure in cures(train)]:
            return None, old
        # The recipe of an older run has empty tables there, which set nothing.
        raw = {**raw, "train": {key: value for key, value in train.items() if value != {}}}
    try:
        return Recipe.model_validate(raw), []
    except ValidationError as error:
        return None, explain(error.errors(include_url=False), Recipe, str(path), ())


def _put(raw: Any, keys: list[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys):
        index: Any = key
        if isinstance(raw, list) and key.isdigit() and int(key) < len(raw):
            index = int(key)
        elif isinstance(raw, dict):
            raw.setdefault(key, {})
        else:
            where = ".".join(keys[:depth])
            raise RecipeError(f"'{override}': {where} is no table, so it has no '{key}'")
        table, raw = raw, raw[index]
    table[index] = value


def _suggest(text: str, error: str) -> str:
    """Return a hint: the key that is there twice, or a text without quotes."""
    place = re.search(r"at line (\d+)", error)
    line = text.splitlines()[int(place[1]) - 1 :][:1] if place else []
    if "overwrite" in error:
        return f": {''.join(line).partition('=')[0].strip()} is there twice; remove one"
    match = re.match(r"\s*([\w.-]+)\s*=\s*([A-Za-z~./$][^#\"']*)", "".join(line))
    if match is None or not isinstance(value_of(match[2].strip()), str):
        return ""
    key, value = match[1], match[2].strip()
    if value.lower() in ("true", "false"):
        return f"; write {key} = {value.lower()}"
    return f'; texts need quotes: {key} = "{value}"'
