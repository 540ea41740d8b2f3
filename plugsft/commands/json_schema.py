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

ENABLED = {
    "type": "boolean",
    "default": True,
    "description": "false keeps the options and switches the plugin off.",
}


def print_schema() -> None:
    """Print the JSON schema of recipes, with the options of every plugin that can be imported."""
    # Editors read what we print: the chatter of a plugin's imports must not stand in it.
    with redirect_stdout(sys.stderr):
        made = make_schema(find())
    print(json.dumps(made, indent=2))


def make_schema(found: dict[str, FoundPlugin]) -> dict[str, Any]:
    """Return the schema of recipes, where [plugins] has a property for each plugin."""
    classes, missing = {}, {}
    for name, plugin in found.items():
        try:
            classes[name] = load_class(plugin)
        except Exception as error:  # an import runs any code; the other plugins' options stand
            note = f"Its options are not known here: {error}."
            missing[name] = {"type": "object", "description": f"{plugin.summary} {note}".strip()}
    tables: dict[str, Any] = {"": Recipe, **classes}
    # All at once: definitions of the same name in two plugins are then told apart.
    adapters: list[tuple[str, Literal["validation"], TypeAdapter[Any]]] = [
        (name, "validation", TypeAdapter(table)) for name, table in tables.items()
    ]
    places, whole = TypeAdapter.json_schemas(adapters, schema_generator=_Lenient)
    definitions = whole["$defs"]
    named = {
        name: definitions[place["$ref"].rpartition("/")[2]] for (name, _), place in places.items()
    }
    for name, cls in classes.items():
        options = named[name]
        known = {option for option, _ in fields(cls)}
        kept = {key: value for key, value in options.get("properties", {}).items() if key in known}
        options["properties"] = {"enabled": {**ENABLED}, **kept}
        options.setdefault("description", found[name].summary)
    for definition in definitions.values():
        _tell_defaults(definition.get("properties", {}))
    recipe = definitions.pop(places["", "validation"]["$ref"].rpartition("/")[2])
    recipe["properties"]["plugins"] = {
        "type": "object",
        "description": recipe["properties"]["plugins"]["description"],
        "properties": {name: missing.get(name) or places[name, "validation"] for name in found},
        "additionalProperties": False,
    }
    return {"$schema": GenerateJsonSchema.schema_dialect, **recipe, "$defs": definitions}


def _tell_defaults(options: dict[str, dict[str, Any]]) -> None:
    """Say each option's default where editors show it: in its description."""
    for option in options.values():
        if option.get("default") not in (None, {}):
            shown = json.dumps(option["default"], ensure_ascii=False)
            told = f"{option.get('description', '')} Default: {shown}."
            option["description"] = told.strip()


class _Lenient(GenerateJsonSchema):
    """Lets pass what JSON cannot express: it is state of a plugin, which is no option."""

    def handle_invalid_for_json_schema(
        self, schema: CoreSchema, error_info: str
    ) -> JsonSchemaValue:
        return {}
