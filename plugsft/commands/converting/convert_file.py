"""Convert a file, check the recipe, and write it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.console import say
from ...base.errors import PlugsftError, RecipeError, choices
from ...base.limits import parse_toml
from ...registry.load import resolve
from ..overview import schema_text
from ..starting_files import SCHEMA, write_files
from . import axolotl, llamafactory, trl
from .conversion import Conversion, Tool
from .read_settings import read_settings
from .recipe_text import launch_line, left_lines, recipe_text

TOOLS = {"axolotl": axolotl.TOOL, "llamafactory": llamafactory.TOOL, "trl": trl.TOOL}
"""Value of --from -> the tool."""


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
    if trainer and (tool is not trl.TOOL or trainer not in trl.RATES):
        hint = choices(trainer, trl.RATES, "for trl, choose one of")
        raise RecipeError(f"--trainer {trainer}: is not known{hint}")
    if tool is trl.TOOL:
        trl.choose_trainer(c, trainer)
    tool.apply(c)
    return c


def tool_of(settings: Mapping[str, Any], path: Path, named: str) -> Tool:
    """Return the tool that a configuration is for: the one named, or that of its keys."""
    if named:
        if named not in TOOLS:
            hint = choices(named, TOOLS, "choose one of")
            raise RecipeError(f"--from {named}: is not known{hint}")
        return TOOLS[named]
    if {"model", "train"} <= settings.keys() and isinstance(settings["train"], dict):
        raise RecipeError(f"{path}: is a recipe of plugsft already; run `plugsft check {path}`")
    counts = [sum(mark in settings for mark in tool.marks) for tool in TOOLS.values()]
    if counts.count(max(counts)) > 1:
        raise RecipeError(
            f"{path}: its keys are not those of axolotl, LLaMA-Factory or TRL; name its tool with "
            f"--from {'|'.join(TOOLS)}"
        )
    return [*TOOLS.values()][counts.index(max(counts))]


def ensure_valid(c: Conversion, text: str) -> None:
    """Refuse a recipe that plugsft would refuse; name the settings behind each mistake."""
    try:
        resolve(parse_toml(text), path=c.path)
    except RecipeError as error:
        problems = []
        for problem in error.problems:
            key = problem.removeprefix(f"{c.path}: ").partition(":")[0]
            origin = c.lines[key].comment if key in c.lines else ""
            problems.append(f"{problem} ({origin})" if origin else problem)
        raise RecipeError(problems) from error
