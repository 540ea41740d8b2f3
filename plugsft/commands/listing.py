"""What there is: plugins, the schema of recipes, and what came of a run. Starts without torch."""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema
from rich.text import Text

from ..base.console import out, say
from ..base.errors import RecipeError
from ..base.step_folders import newest_checkpoint
from ..output.folder import is_held
from ..output.report import read_metrics, read_record
from ..recipe.parse import fields
from ..recipe.tables import Recipe
from ..registry.discover import FoundPlugin, find, load_class

ENABLED = {
    "type": "boolean",
    "default": True,
    "description": "false keeps the options and switches the plugin off.",
}


def list_plugins() -> None:
    """Print every plugin there is, importing none."""
    found = find()
    if not found:
        say("no plugins; `plugsft new-plugin NAME` writes the skeleton of one")
        return
    wide = max(map(len, found))
    origins = max(len(plugin.origin) for plugin in found.values())
    for plugin in found.values():
        rest = f"  {plugin.origin:<{origins}}  {plugin.summary}"
        out.print(Text.assemble((f"{plugin.name:<{wide}}", "bold"), rest.rstrip()))


def schema() -> None:
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


def show_run(folder: Path) -> None:
    """Print what came of a run."""
    try:
        run = read_record(folder)
        lines = list(_summary(run, folder))
    except OSError as error:
        raise RecipeError(f"{folder}: is no run's output: it has no readable run.json") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RecipeError(f"{folder / 'run.json'}: was not written by plugsft") from error
    for name, text in lines:
        out.print(Text.assemble((f"{name:<9}", "bold"), text))


def _summary(run: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    steps, final, speed = (run.get(part) or {} for part in ("steps", "final", "throughput"))
    status, reason = run["status"], run.get("reason")
    if status == "running":
        # The record is written when a run begins and ends; in between, the metrics tell.
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
        steps, final = (steps and steps | {"done": len(lines)}), lines[-1] if lines else final
        if not is_held(folder):
            go_on = "--resume" if newest_checkpoint(folder / "checkpoints") else "--overwrite"
            recipe = shlex.quote(str(folder / "recipe.toml"))
            status, reason = "killed", f"go on with plugsft {recipe} {go_on}"
    yield "status", status + (f": {reason}" if reason else "")
    yield "started", run["started"]
    if steps:
        yield "steps", f"{steps['done']:,} of {steps['total']:,}, {steps['per_epoch']:,} an epoch"
    if (loss := final.get("loss")) is not None:
        yield "loss", f"{loss:.4f}"
    if (loss := final.get("eval_loss")) is not None:
        yield "eval", f"{loss:.4f}"
    if "seconds" in run:
        yield "time", str(timedelta(seconds=round(run["seconds"])))
    if speed:
        yield "speed", f"{speed['tokens_per_second']:,.0f} tokens/s"
    if "memory" in run:
        yield "memory", f"{run['memory']['peak_gib']:.1f} GiB at most"
    machine = run["machine"]
    yield (
        "machine",
        ", ".join(str(machine[key]) for key in ("host", "device", "launcher") if key in machine),
    )
    if model := run.get("model"):
        count = f"{model['parameters']:,} parameters, {model['dtype']}"
        yield "model", f"{model['type']} ({model['source']}), {count}"
    for name in ("data", "eval"):
        if facts := run.get(name):
            yield name, _data(facts)
    for plugin in run.get("plugins", ()):
        yield "plugin", f"{plugin['name']}: {plugin['verdict']}"
    for warning in run.get("warnings", ()):
        yield "warning", warning
    if (folder / "report.html").is_file():
        yield "report", str(folder / "report.html")
    if (folder / "model").is_dir():
        yield "talk", f"plugsft chat {shlex.quote(str(folder))}"


def _data(facts: dict[str, Any]) -> str:
    names = ", ".join(source["name"] for source in facts["sources"])
    share = facts["trained_tokens"] / facts["tokens"]
    bad = sum(entry["count"] for entry in facts["bad_rows"].values())
    return (
        f"{names}: {facts['examples']:,} examples, {facts['tokens']:,} tokens, {share:.0%} trained "
        f"on, {bad:,} bad rows, {facts['truncated']['count']:,} truncated"
    )


class _Lenient(GenerateJsonSchema):
    """Lets pass what JSON cannot express: it is state of a plugin, which is no option."""

    def handle_invalid_for_json_schema(
        self, schema: CoreSchema, error_info: str
    ) -> JsonSchemaValue:
        return {}
