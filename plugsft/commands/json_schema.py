"""The JSON schema of recipes, for editors."""

import json
import sys
from contextlib import redirect_stdout
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

from ..recipe.parse import fields
from ..recipe.tables import Recipe
from ..registry.discover import FoundPlugin, find, load_class
from .recipe_overview import summary_of

ENABLED = {
    "type": "boolean",
    "default": True,
    "description": "false keeps the options and switches the plugin off.",
}


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
