"""What recipes may hold: plugins, hooks and who answers them, and the JSON schema."""

import ast
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

from ..base.console import print_table, say
from ..hooks import CORE
from ..output.folder import find_run
from ..recipe.parse import fields, resolved
from ..recipe.tables import Recipe
from ..registry.active import options_of
from ..registry.discover import FoundPlugin, find, load_class
from ..registry.load import load

CORE_NOTICES = ("logged",)
"""The notices that the core implements; it answers every stage. Listed here to avoid torch."""
ENABLED = {
    "type": "boolean",
    "default": True,
    "description": "false keeps the options and switches the plugin off.",
}


def list_plugins() -> None:
    """Print every installed plugin, importing none."""
    plugins = find()
    if not plugins:
        say("no plugins; `plugsft new-plugin NAME` writes a skeleton")
        return
    print_table([(name, plugin.origin, summary_of(plugin)) for name, plugin in plugins.items()])


def summary_of(plugin: FoundPlugin) -> str:
    """Return a plugin's first line of documentation, or its package's summary."""
    if isinstance(plugin.source, Path):
        text = ast.get_docstring(ast.parse(plugin.source.read_text(encoding="utf8"))) or ""
        return text.partition("\n")[0]
    # Not []: it raises for missing fields if a package has imported importlib_metadata.
    metadata: Any = plugin.source.metadata
    return metadata.get("Summary") or ""


def show_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Print a recipe as TOML with every default filled in."""
    recipe, _ = load(path, overrides)
    say(resolved(recipe).rstrip())


def list_hooks(path: Path, overrides: Sequence[str], without: Sequence[str]) -> None:
    """Print who answers and who wraps each hook, then each plugin's options and summary."""
    recipe, active = load(path, overrides, without)
    active.attach()
    hooks = []
    for hook, is_stage, answers, wrappers in active.describe():
        names = [*answers, CORE] if is_stage or hook in CORE_NOTICES else answers
        text = (", else " if is_stage else ", ").join(names) or "nobody"
        wrapped = f", wrapped by {', then '.join(wrappers)}" if wrappers else ""
        hooks.append((hook, "stage" if is_stage else "notice", text + wrapped))
    print_table(hooks)
    last = {
        plugin.name: f"{plugin.summary} (last run)" for plugin in find_run(recipe.folder).plugins
    }
    for name, plugin in active.plugins.items():
        options = options_of(plugin)
        shown = ", ".join(
            f"{key} = {json.dumps(value, default=str)}" for key, value in options.items()
        )
        say(f"\n{name}  {active.found[name].origin}")
        say(f"  options  {shown or 'none'}")
        say(f"  summary  {last.get(name, 'not run yet')}")


def schema_text() -> str:
    """Return the JSON schema of recipes, with the options of importable plugins."""
    # Editors read our output, so a plugin's import must not print into it.
    with redirect_stdout(sys.stderr):
        schema = make_schema(find())
    return json.dumps(schema, indent=2)


def make_schema(found: dict[str, FoundPlugin]) -> dict[str, Any]:
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
    tables: dict[str, Any] = {"": Recipe, **classes}
    # In one call, so that definitions of the same name in two plugins stay separate.
    adapters: list[tuple[str, Literal["validation"], TypeAdapter[Any]]] = [
        (name, "validation", TypeAdapter(table)) for name, table in tables.items()
    ]
    references, schemas = TypeAdapter.json_schemas(adapters, schema_generator=_Lenient)
    definitions = schemas["$defs"]
    by_name = {
        name: definitions[reference["$ref"].rpartition("/")[2]]
        for (name, _), reference in references.items()
    }
    for name, cls in classes.items():
        table = by_name[name]
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
    # JSON files have no comments: editors find the schema of a recipe by this key of the file.
    recipe["properties"]["$schema"] = {"type": "string", "description": "The schema, for editors."}
    return {"$schema": GenerateJsonSchema.schema_dialect, **recipe, "$defs": definitions}


def _describe_defaults(options: dict[str, dict[str, Any]]) -> None:
    """Add each option's default to its description, which editors show."""
    for option in options.values():
        if option.get("default") not in (None, {}):
            shown = json.dumps(option["default"], ensure_ascii=False)
            description = f"{option.get('description', '')} Default: {shown}."
            option["description"] = description.strip()


class _Lenient(GenerateJsonSchema):
    """Accept types that JSON cannot express: they are a plugin's state, not options."""

    def handle_invalid_for_json_schema(
        self, schema: CoreSchema, error_info: str
    ) -> JsonSchemaValue:
        return {}
