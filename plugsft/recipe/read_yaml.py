"""Parse recipes in YAML, by the rules of YAML 1.2."""

import re
from typing import Any

import yaml

from ..base.errors import RecipeError
from ..base.limits import limited_depth

FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
RULES = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": rf"{FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
"""Type -> how YAML 1.2 spells its values without quotes; all else is text: no, off, 12:30."""
TAG = "tag:yaml.org,2002:"
RESOLVERS = {None: [(TAG + kind, re.compile(rf"(?:{rule})\Z")) for kind, rule in RULES.items()]}
BASES = {"0o": 8, "0x": 16}
LAYOUT = "; indent the keys of a table alike, by spaces, and write a space after each colon"
MOST_VALUES = 100_000
"""Most values of a recipe, where each alias (*name) counts as all that it repeats."""
MOST_CHARACTERS = 1 << 20
"""Most characters of a recipe in YAML."""


def parse_yaml(text: str, path: str) -> dict[str, Any]:
    """Parse YAML; raise ValueError for its syntax, RecipeError for a value that recipes lack."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    try:
        loader = yaml.SafeLoader(text)
        loader.yaml_implicit_resolvers = RESOLVERS
        with limited_depth():
            root = loader.get_single_node()
            tables = {} if root is None else _Values(path).of(root, ())
    except yaml.MarkedYAMLError as error:
        problem = f"{error.problem}".replace("but found", "found")
        hint = LAYOUT if re.search(r"\\t|block|mapping values|expected ':'", problem) else ""
        raise ValueError(f"{problem}{_place(error.problem_mark)}{hint}") from error
    except yaml.YAMLError as error:  # a character that no text file has
        raise ValueError(str(error).partition("\n")[0]) from error
    if not isinstance(tables, dict):
        raise ValueError("it should have tables, such as model:, data: and train:")
    return tables


class _Values:
    """Values of YAML's nodes."""

    def __init__(self, path: str) -> None:
        self.path, self.count = path, 0

    def of(self, node: yaml.Node, keys: tuple[str, ...]) -> Any:
        """Return the value of the node at `keys`."""
        self.count += 1
        if self.count > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values, as its aliases repeat them")
        kind = node.tag.removeprefix(TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._table(node, keys)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.of(each, (*keys, str(n))) for n, each in enumerate(node.value)]
        text = str(node.value)
        if isinstance(node, yaml.ScalarNode) and kind == "str":
            return text
        if kind not in RULES or not re.fullmatch(RULES[kind], text):
            raise self._refused(node, keys, f"has the tag {node.tag}", "remove it")
        if kind == "null":
            cure = "remove the key, or write {} for a table without keys"
            raise self._refused(node, keys, "has no value", cure)
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            return int(text, BASES.get(text[:2], 10))
        return float(re.sub(r"\.(?=[A-Za-z])", "", text))  # .inf

    def _table(self, node: yaml.MappingNode, keys: tuple[str, ...]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for name, value in node.value:
            key = name.value
            if name.tag != f"{TAG}str":
                raise self._refused(name, keys, "has a key that is no text", "put it in quotes")
            if key == "<<":
                raise self._refused(name, keys, "has a merge key, <<", "repeat its keys here")
            if key in table:
                raise self._refused(name, (*keys, key), "is written twice", "remove one")
            table[key] = self.of(value, (*keys, key))
        return table

    def _refused(
        self, node: yaml.Node, keys: tuple[str, ...], problem: str, cure: str
    ) -> RecipeError:
        key = ".".join(keys) or "the recipe"
        return RecipeError(f"{self.path}: {key}: {problem}{_place(node.start_mark)}; {cure}")


def _place(mark: Any) -> str:
    return f" (at line {mark.line + 1}, column {mark.column + 1})"
