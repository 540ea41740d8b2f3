"""What recipes may hold: plugins and their options, hooks and who answers them, the schema."""

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

from ..base.console import say
from ..base.errors import RecipeError, did_you_mean
from ..base.for_commands import print_table
from ..hooks import CORE
from ..recipe.parse import fields, resolved
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..registry.contracts import SPECS, contract_of, hook_mark, is_stage
from ..registry.discover import BUNDLED, FoundPlugin, find, load_class
from ..registry.load import load

Schema: TypeAlias = dict[str, Any]
"""A JSON schema, or a part of one."""
MEASURED = Path(__file__).with_name("measured.json")
"""What each plugin changed where it was measured; tools/bench/readme_table.py writes it."""
CORE_NOTICES = ("logged",)
"""The notices that the core implements; it answers every stage. Listed here to avoid torch."""
ENABLED = {
    "type": "boolean",
    "default": True,
    "description": "false keeps the options and switches the plugin off.",
}

TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "array": "list",
    "object": "table",
}
LIMITS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
}


def list_plugins() -> None:
    """Print every installed plugin, importing none."""
    plugins = find()
    print_table([(name, plugin.origin, summary_of(plugin)) for name, plugin in plugins.items()])
    say("`plugsft plugins NAME` explains one")


def summary_of(plugin: FoundPlugin) -> str:
    """Return a plugin's first line of documentation, or its package's summary."""
    if isinstance(plugin.source, Path):
        text = ast.get_docstring(ast.parse(plugin.source.read_text(encoding="utf8"))) or ""
        return text.partition("\n")[0]
    # Not []: it raises for missing fields if a package has imported importlib_metadata.
    metadata: Any = plugin.source.metadata
    return metadata.get("Summary") or ""


def show_plugin(name: str) -> None:
    """Print what a plugin does, its options, and what it asks of recipe and machine."""
    found = find()
    if name not in found:
        hint = did_you_mean(name, found) or "; `plugsft plugins` lists all plugins"
        raise RecipeError(f"'{name}' is neither a plugin nor a recipe{hint}")
    cls, schema = load_class(found[name]), make_schema({name: found[name]})
    table = table_in(schema, schema["properties"]["plugins"]["properties"][name])
    say(f"{table['description']}\n\n[plugins.{name}]")
    for option, value in table["properties"].items():
        must = ", required" * (option in table.get("required", ()))
        say(f"  {option}: {type_in_words(value)}{must}")
        meaning = value.get("description", "")
        say(fill(meaning, 100, initial_indent="      ", subsequent_indent="      "))
    say("")
    print_table([*claims_of(cls).items()])
    for text in json.loads(MEASURED.read_text("utf8")).get(name, ()):
        say(f"measured: {text}")
    if found[name].origin == BUNDLED:
        say(f"docs/reference.md#plugins{name}; docs/benchmarks.md has all that was measured")


def claims_of(cls: type[Any]) -> dict[str, str]:
    """What a plugin declares in @plugin(...), and the stages that it answers or wraps."""
    contract = contract_of(cls)
    marks = {hook: mark for hook in SPECS if (mark := hook_mark(cls, hook)) and is_stage(hook)}
    metrics = "by its options" if callable(contract.metrics) else ", ".join(contract.metrics)
    claims = {
        "needs": ", ".join(f"pip install 'plugsft[{extra}]'" for extra in contract.needs.values()),
        "requires": ", ".join(contract.requires),
        "refuses": "; ".join(f"{other}: {why}" for other, why in contract.conflicts.items()),
        "answers": ", ".join(hook for hook, mark in marks.items() if not mark["wrapper"]),
        "wraps": ", ".join(hook for hook, mark in marks.items() if mark["wrapper"]),
        "metrics": metrics,
        "affects results": ", ".join(contract.affects_results) or "none of its options",
    }
    return {word: text for word, text in claims.items() if text}


def type_in_words(value: Schema, plural: str = "") -> str:
    """Describe the type of a key of the schema: whole number, from 1."""
    if "anyOf" in value:
        kinds = (type_in_words(kind) for kind in value["anyOf"] if kind != {"type": "null"})
        return ", or ".join(kinds)
    if names := value.get("enum", [value["const"]] if "const" in value else []):
        return ", ".join(map(json.dumps, names))
    kind = TYPES[value.get("type", "object")] + plural
    inner = value.get("items", value.get("additionalProperties"))
    if isinstance(inner, dict) and "$ref" not in inner:
        kind += f" of {type_in_words(inner, 's')}"
    limits = (
        f" {word} {value[key]:,}" for key, word in LIMITS.items() if value.get(key, 2**31) < 2**31
    )
    return ",".join(filter(None, [kind, "".join(limits)]))


def table_in(schema: Schema, place: Schema) -> Schema:
    """Find the table of the schema that a place of it names."""
    table: Schema = schema["$defs"][place["$ref"].rpartition("/")[2]]
    return table


def show_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Print a recipe as TOML with every default filled in."""
    recipe, _ = load(path, overrides)
    say(resolved(recipe).rstrip())


def list_hooks(path: Path, overrides: Sequence[str], without: Sequence[str]) -> None:
    """Print who answers and who wraps each hook."""
    _, active = load(path, overrides, without)
    active.attach()
    hooks = []
    for hook, stage, answers, wrappers in describe_hooks(active):
        names = [*answers, CORE] if stage or hook in CORE_NOTICES else answers
        text = (", else " if stage else ", ").join(names) or "nobody"
        wrapped = f", wrapped by {', then '.join(wrappers)}" if wrappers else ""
        hooks.append((hook, "stage" if stage else "notice", text + wrapped))
    print_table(hooks)


def describe_hooks(active: Active) -> Iterator[tuple[str, bool, list[str], list[str]]]:
    """Yield each hook: name, whether a stage, answering plugins, wrappers (outermost last)."""
    for hook in SPECS:
        answers = active.answering(hook)
        wrappers = [name for name in active.having(hook) if name not in answers]
        yield hook, is_stage(hook), answers, wrappers


def schema_text() -> str:
    """Return the JSON schema of recipes, with the options of importable plugins."""
    # Editors read our output, so a plugin's import must not print into it.
    with redirect_stdout(sys.stderr):
        schema = make_schema(find())
    return json.dumps(schema, indent=2)


def make_schema(found: dict[str, FoundPlugin]) -> Schema:
    """Return the schema of recipes, where [plugins] has a property for each plugin."""
    classes, missing = {}, {}
    for name, plugin in found.items():
        try:
            classes[name] = load_class(plugin)
        except Exception as error:  # an import may raise anything
            note = f"Its options are not known here: {error}."
            missing[name] = {
                "type": "object",
                "description": f"{summary_of(plugin)} {note}".strip(),
            }
    tables: dict[str, type[Any]] = {"": Recipe, **classes}
    # In one call, so that definitions of the same name in two plugins stay separate.
    adapters: list[tuple[str, Literal["validation"], TypeAdapter[Any]]] = [
        (name, "validation", TypeAdapter(table)) for name, table in tables.items()
    ]
    references, schemas = TypeAdapter.json_schemas(adapters, schema_generator=_Lenient)
    definitions = schemas["$defs"]
    for name, cls in classes.items():
        table = table_in(schemas, references[name, "validation"])
        names = {option for option, _ in fields(cls)}
        options = {key: value for key, value in table.get("properties", {}).items() if key in names}
        table["properties"] = {"enabled": {**ENABLED}, **options}
        table.setdefault("description", summary_of(found[name]))
    for definition in definitions.values():
        _describe_defaults(definition.get("properties", {}))
    recipe = definitions.pop(references["", "validation"]["$ref"].rpartition("/")[2])
    recipe["properties"]["plugins"] = {
        "type": "object",
        "description": recipe["properties"]["plugins"]["description"],
        "properties": {name: missing.get(name) or references[name, "validation"] for name in found},
        "additionalProperties": False,
    }
    return {"$schema": GenerateJsonSchema.schema_dialect, **recipe, "$defs": definitions}


def _describe_defaults(options: dict[str, Schema]) -> None:
    """Add each option's default to its description, which editors show."""
    for option in options.values():
        description = option.get("description", "")
        if option.get("default") not in (None, {}) and "Default: " not in description:
            shown = json.dumps(option["default"], ensure_ascii=False)
            option["description"] = f"{description} Default: {shown}.".strip()


class _Lenient(GenerateJsonSchema):
    """Accept types that JSON cannot express: they are a plugin's state, not options."""

    def handle_invalid_for_json_schema(
        self, schema: CoreSchema, error_info: str
    ) -> JsonSchemaValue:
        return {}
