"""Convert a file: read its settings, name the tool, write the recipe."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from ...base.console import say
from ...base.errors import PlugsftError, RecipeError, choices, reason_of
from ...base.limits import parse_toml, read_text
from ...recipe.read_yaml import MOST_VALUES
from ...registry.load import resolve
from ..overview import schema_text
from ..starting_files import POINTER, SCHEMA, write_files
from . import axolotl, llamafactory, trl
from .conversion import KEYS, NO_LINE, Conversion, Table, Tool, printable

ORDER = ("model", "data", "eval", "train", "checkpoint", "plugins")
"""The tables of a recipe, in order."""
TOOLS = {"axolotl": axolotl.TOOL, "llamafactory": llamafactory.TOOL, "trl": trl.TOOL}
"""Value of --from -> the tool."""


def read_settings(path: Path) -> Table:
    """Return the settings of a file."""
    if path.suffix not in ("", ".yaml", ".yml", ".json"):
        raise RecipeError(
            f"{path}: convert reads settings in YAML or JSON, and runs no program; write a file "
            "of the other tool's arguments, a line each: max_length: 1024"
        )
    try:
        text = read_text(path)
        if path.suffix == ".json":
            text = text.replace("\t", " ")  # JSON is YAML, but for tabs
        settings = yaml.load(text, _Loader)  # a SafeLoader
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
    return settings


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Loads YAML, and refuses a key that is written twice: YAML would take the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, seen = super().compose_mapping_node(anchor), set[str]()
        for name in [name for name, _ in node.value if isinstance(name, yaml.ScalarNode)]:
            if name.value in seen:
                line = name.start_mark.line + 1
                raise ValueError(f"{name.value} is written twice, again at line {line}; remove one")
            seen.add(name.value)
        return node


def values(value: Any) -> Iterator[Any]:
    """Yield a value, and all values inside it."""
    yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from values(inner)


def recipe_text(c: Conversion, name: Path) -> str:
    """Return the whole recipe."""
    tables: Table = {table: {} for table in ORDER}
    for key, line in c.lines.items():
        *above, option = key.split(".")
        table = tables
        for each in above:
            table = table.setdefault(each, {})
        table[option] = line.value
    try:
        text = tomli_w.dumps({key: table for key, table in tables.items() if table})
    except TypeError as error:
        raise RecipeError(f"{c.path}: a list or table has an empty value; set it") from error
    key = c.first("deepspeed", "fsdp", "fsdp_config", "dp_shard_size")
    launched_by = f"      # {key}: {c.shown(key)}" if c.launcher else ""
    lines = [
        POINTER.strip(),
        f"# Converted by plugsft from {printable(c.path.name)}, which is for {c.tool}.",
        "# The comments hold its settings.",
        "#",
        f"#   plugsft check {name}",
        f"#   plugsft inspect {name}      # the tokens that are trained",
        f"#   {launch_line(c, name)}{launched_by}",
        "",
        *_with_comments(c, text),
    ]
    if c.left:
        lines += ["", f"# Settings of {c.tool} that are not converted:"]
        lines += [f"#   {line}" for line in left_lines(c)]
    return "\n".join(lines) + "\n"


def launch_line(c: Conversion, name: Path) -> str:
    """Return the command that trains."""
    if c.gpus == 1 and not c.launcher:
        return f"plugsft {name}"
    strategy = f" --strategy {c.launcher}" if c.launcher else ""
    return f"plugsft launch {name} --ranks {c.gpus}{strategy}"


def left_lines(c: Conversion) -> list[str]:
    """Return a line for each key that is not converted: key, value and reason."""
    return [printable(f"{key} = {c.shown(key)}: {reason}") for key, reason in c.left.items()]


def _with_comments(c: Conversion, text: str) -> list[str]:
    """Return the lines of a recipe, each with the settings that it comes from."""
    lines, table = [], ""
    for line in text.strip().split("\n"):
        name = line.partition(" = ")[0]
        if line.startswith("["):
            table, name = line.strip("[]"), ""
        key = ".".join(filter(None, (table, name)))
        comment = printable(c.lines.get(key, NO_LINE).comment)
        lines.append(f"{line.ljust(32)} # {comment}" if line and comment else line)
    return lines


def convert_file(path: Path, to: Path, named: str, trainer: str, gpus: int) -> Conversion:
    """Write a configuration as a recipe, and say what is not converted."""
    if to.suffix != ".toml":
        raise PlugsftError(f"--to {to}: a recipe's name ends with .toml; set --to {to}.toml")
    c = convert_settings(path, named, trainer, gpus)
    if to.exists():
        raise PlugsftError(f"{to} exists already; move it away, or set --to")
    files = {to: recipe_text(c, to)}
    ensure_valid(c, files[to])
    schema = to.parent / Path(SCHEMA).name
    if not schema.exists():
        files = {schema: schema_text() + "\n", **files}
    write_files(files)  # the recipe last
    says = [f"written: {file}" for file in files]
    says += [f"not converted: {line}" for line in left_lines(c)]
    commands = (f"plugsft check {to}", f"plugsft inspect {to}", launch_line(c, to))
    for line in (*says, *c.remarks, "Next:", *(f"  {command}" for command in commands)):
        say(line)
    return c


def convert_settings(path: Path, named: str, trainer: str, gpus: int) -> Conversion:
    """Read a configuration, and convert its settings."""
    settings = read_settings(path)
    tool = tool_of(settings, path, named)
    c = Conversion(tool.name, path, settings, gpus)
    if trainer and (tool is not trl.TOOL or trainer not in trl.TRAINERS):
        hint = choices(trainer, trl.TRAINERS, "for trl, choose one of")
        raise RecipeError(f"--trainer {trainer}: is not known{hint}")
    if tool is trl.TOOL:
        trl.choose_trainer(c, trainer)
    tool.apply(c)
    return c


def tool_of(settings: Table, path: Path, named: str) -> Tool:
    """Return the tool that a configuration is for: the one named, or that of its keys."""
    if named:
        if named not in TOOLS:
            hint = choices(named, TOOLS, "choose one of")
            raise RecipeError(f"--from {named}: is not known{hint}")
        return TOOLS[named]
    if {"model", "train"} <= settings.keys() and isinstance(settings["train"], dict):
        raise RecipeError(f"{path}: is a recipe of plugsft already; run `plugsft check {path}`")
    tools = [*TOOLS.values()]
    counts = [len(settings.keys() & {*KEYS[tool.sections[-1]]["marks"]}) for tool in tools]
    if counts.count(max(counts)) > 1:
        raise RecipeError(
            f"{path}: its keys are not those of axolotl, LLaMA-Factory or TRL; name its tool with "
            f"--from {'|'.join(TOOLS)}"
        )
    return tools[counts.index(max(counts))]


def ensure_valid(c: Conversion, text: str) -> None:
    """Refuse a recipe that plugsft would refuse; name the settings behind each mistake."""
    try:
        resolve(parse_toml(text), path=c.path)
    except RecipeError as error:
        problems = []
        for problem in error.problems:
            key = problem.removeprefix(f"{c.path}: ").partition(":")[0]
            origin = c.lines.get(key, NO_LINE).comment
            problems.append(f"{problem} ({origin})" if origin else problem)
        raise RecipeError(problems) from error
