"""Read a configuration file: YAML, JSON, or the words of a shell line."""

import json
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ...base.errors import RecipeError, reason_of
from ...base.limits import TABLES, NestedTooDeep, read_text
from ...recipe.read_yaml import MOST_VALUES

TRAINERS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "distillation")
"""Commands of `trl`."""


def read_settings(path: Path) -> tuple[dict[str, Any], str]:
    """Return the settings of a file, and the trainer that a shell line names."""
    try:
        text = read_text(path)
        words = shell_words(text)
        if words:
            return read_words(words, path)
        # JSON is YAML, but for tabs; _Loader is a SafeLoader.
        settings = yaml.load(text.replace("\t", " ") if path.suffix == ".json" else text, _Loader)
        if sum(1 for _ in islice(values(settings), MOST_VALUES + 1)) > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values, as its aliases repeat them")
        json.dumps(settings, default=str, ensure_ascii=False).encode()  # keys and letters
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({reason_of(error)})") from error
    except (TypeError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{path}: cannot be read as YAML or JSON: {reason_of(error)}") from error
    if not isinstance(settings, dict) or not settings:
        raise RecipeError(
            f"{path}: has no settings; name a configuration of axolotl, LLaMA-Factory or TRL"
        )
    return {str(key): value for key, value in settings.items()}, ""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Loads YAML; refuses keys that are written twice, of which the last would win silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, seen = super().compose_mapping_node(anchor), set[str]()
        for name in [name for name, _ in node.value if isinstance(name, yaml.ScalarNode)]:
            if name.value in seen:
                line = name.start_mark.line + 1
                raise ValueError(f"{name.value} is written twice, again at line {line}; remove one")
            seen.add(name.value)
        return node


def values(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a value, and all values inside it."""
    if depth > TABLES:
        raise NestedTooDeep(f"nested deeper than {TABLES} levels")
    yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from values(inner, depth + 1)


def shell_words(text: str) -> list[str]:
    """Return the words of a file that holds one command with options, else nothing."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    commands = [line for line in lines if not line.startswith("#") and " --" in line]
    return shlex.split(commands[0]) if len(commands) == 1 and "\n-" not in text else []


def read_words(words: list[str], path: Path) -> tuple[dict[str, Any], str]:
    """Read options of a shell line, and the file that --config names."""
    settings: dict[str, Any] = {}
    trainer = key = ""
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            key = name.replace("-", "_")
            settings[key] = [yaml.safe_load(value)] if sign else []
        elif key:
            settings[key].append(yaml.safe_load(word))
        elif word in TRAINERS:
            trainer = word
    for key, given in [*settings.items()]:
        settings[key] = given[0] if len(given) == 1 else given or True
        if not given and key.startswith("no_"):
            settings[key.removeprefix("no_")] = not settings.pop(key)
    config = settings.pop("config", None)
    if isinstance(config, str):
        file = Path(config) if Path(config).exists() else path.parent / config
        settings = read_settings(file)[0] | settings
    return settings, trainer
