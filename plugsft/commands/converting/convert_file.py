"""Convert a file, check the recipe, and write it."""

from pathlib import Path

from ...base.atomic import replace_file
from ...base.console import say
from ...base.errors import PlugsftError, RecipeError, did_you_mean, reason_of
from ...base.limits import parse_toml
from ...registry.load import resolve
from ..bundled_recipes import SCHEMA
from ..json_schema import schema_text
from . import axolotl, llamafactory, trl
from .conversion import Conversion, apply
from .read_settings import TOOLS, read_settings, tool_of, values
from .recipe_text import launch_line, left_lines, recipe_text
from .trl_trainers import RATES, choose_trainer

RULES = {"axolotl": axolotl.rules, "llamafactory": llamafactory.rules, "trl": trl.rules}
"""Value of --from -> the tool's table."""


def convert_file(path: Path, to: Path, named: str, trainer: str, gpus: int) -> Conversion:
    """Write a configuration as a recipe, and say what is not converted."""
    if to.suffix != ".toml":
        raise PlugsftError(f"--to {to}: a recipe's name ends with .toml; set --to {to}.toml")
    conversion = convert_settings(path, named, trainer, gpus)
    files = {to.with_suffix(f".{end}"): text for end, text in conversion.files.items()}
    for file in (to, *files):
        if file.exists():
            raise PlugsftError(f"{file} exists already; move it away, or set --to")
    for file in files:
        conversion.lines["model.chat_template"].value = str(file)
    files[to] = recipe_text(conversion, to)
    ensure_valid(conversion, files[to])
    schema = to.parent / Path(SCHEMA).name
    if not schema.exists():
        files = {schema: schema_text() + "\n", **files}
    try:
        for file, text in files.items():  # the recipe last
            file.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(file) as temporary:
                temporary.write_text(text, "utf8")
    except OSError as error:
        raise PlugsftError(f"{error.filename or to}: {reason_of(error)}; set --to") from error
    _report(conversion, to, [*files])
    return conversion


def convert_settings(path: Path, named: str, trainer: str, gpus: int) -> Conversion:
    """Read a configuration, and convert its settings."""
    settings, command = read_settings(path)
    tool = tool_of(settings, path, named or ("trl" if command else ""))
    conversion = Conversion(TOOLS[tool], path, settings, gpus)
    if trainer and (tool != "trl" or trainer not in RATES):
        names = ", ".join(RATES)
        hint = did_you_mean(trainer, RATES) or f"; choose one of {names}, for trl"
        raise RecipeError(f"--trainer {trainer}: is not known{hint}")
    if tool == "trl":
        choose_trainer(conversion, trainer or command)
    apply(RULES[tool](conversion), conversion)
    return conversion


def ensure_valid(conversion: Conversion, text: str) -> None:
    """Refuse a recipe that plugsft would refuse; name the settings behind each mistake."""
    path = conversion.path
    for key, line in conversion.lines.items():
        if any(value is None for value in values(line.value)):
            raise RecipeError(f"{path}: {key}: a value is missing ({line.comment}); set it")
    try:
        resolve(parse_toml(text), path=path)
    except RecipeError as error:
        problems = []
        for problem in error.problems:
            key = problem.removeprefix(f"{path}: ").partition(":")[0]
            origin = conversion.lines[key].comment if key in conversion.lines else ""
            problems.append(f"{problem} ({origin})" if origin else problem)
        raise RecipeError(problems) from error


def _report(conversion: Conversion, to: Path, files: list[Path]) -> None:
    for file in files:
        say(f"written: {file}")
    for line in left_lines(conversion):
        say(f"not converted: {line}")
    for remark in conversion.remarks:
        say(remark)
    say("Next:")
    for command in (f"plugsft check {to}", f"plugsft inspect {to}", launch_line(conversion, to)):
        say(f"  {command}")
