"""Read a configuration file: YAML or JSON."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ...base.errors import RecipeError, reason_of
from ...base.limits import TABLES, NestedTooDeep, read_text
from ...recipe.read_yaml import MOST_VALUES


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a file."""
    try:
        text = read_text(path)
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
    return {str(key): value for key, value in settings.items()}


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
