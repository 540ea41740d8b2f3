"""Files that a user starts from: bundled recipes (`init`), and the skeleton of a plugin."""

import ast
import json
import keyword
import re
import shlex
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from ..base.atomic import replace_file
from ..base.console import say
from ..base.errors import PluginError, PlugsftError, choices, reason_of
from ..base.for_commands import print_table
from ..base.launch_files import bundled_folder
from ..hooks import is_core
from ..recipe.tables import absolute
from ..registry.discover import PLUGIN_PACKAGE, find
from .overview import schema_text

LAUNCH = "launch"
"""The kind that has no recipe: launch files only."""
SCHEMA = "recipes/recipe.schema.json"
"""Where `init` writes the schema that the first line of a recipe names."""
POINTER = "#:schema ./recipe.schema.json\n"
FILES = Path(__file__).with_name("skeleton_files")
"""A folder for each kind of plugin, and the pyproject.toml that they share."""


def kinds() -> dict[str, str]:
    """Return every kind with its line: the first of its recipe."""
    recipes = sorted((bundled_folder() / "recipes").glob("*.toml"))
    return {
        **{path.stem: path.read_text("utf8").partition("\n")[0][2:] for path in recipes},
        LAUNCH: "Launch files alone: for accelerate, Slurm and torchrun.",
    }


def files_of(kind: str) -> dict[str, str]:
    """Return path -> text: a recipe and all files that it needs."""
    source = bundled_folder()
    paths = [*source.glob("recipes/accelerate/*"), *source.glob("recipes/launch/*")]
    # pip compiles ray_train.py: an installed folder has a __pycache__.
    launch = [path.relative_to(source).as_posix() for path in paths if path.is_file()]
    left = sorted(launch) if kind == LAUNCH else [f"recipes/{kind}.toml"]
    files: dict[str, str] = {}
    while left:
        path = left.pop(0)
        files[path] = (source / path).read_text("utf8")
        named = re.findall(r"recipes/\w[\w./]*\w", files[path] if path.endswith(".toml") else "")
        left += [name for name in dict.fromkeys(named) if name not in (*files, *left)]
    return files


def print_kinds() -> None:
    """Print every kind with its line."""
    print_table([*kinds().items()])
    say("\nplugsft init KIND writes one, with its data and launch files.")


def write(kind: str, folder: Path, places: Mapping[str, str] = {}) -> None:
    """Write a recipe with its files; print the next commands: the recipe's first three."""
    if kind not in kinds():
        hint = choices(kind, kinds(), "choose one of")
        raise PlugsftError(f"'{kind}': no recipe of this name comes with plugsft{hint}")
    recipe = folder / f"recipes/{kind}.toml"
    if recipe.exists():
        raise PlugsftError(f"{recipe} exists already; move it away, or set --to")
    for path in write_missing(kind, folder, places):
        say(f"written: {folder / path}")
    text = recipe.read_text("utf8") if recipe.exists() else ""
    commands = commands_of(text)[:3] or ["plugsft launch RECIPE"]
    say("Next:")
    if folder.resolve() != Path.cwd():
        say(f"  cd {shlex.quote(str(folder))}")
    for command in (*re.findall("^# Needs: (.*)", text, re.M), *commands):
        say(f"  {command}")


def write_missing(kind: str, folder: Path, places: Mapping[str, str] = {}) -> list[str]:
    """Write the files that a folder lacks; return their paths.

    `places` are the user's: of the model, as the key `path`, and of the data, as `source`.
    """
    files = {path: text for path, text in files_of(kind).items() if not (folder / path).exists()}
    own = f"recipes/{kind}.toml"
    for key in filter(places.get, places):
        place = absolute(places[key])  # the commands may run in another folder
        line = f"{key} = {json.dumps(place, ensure_ascii=False)}".replace("\\", r"\\")
        files[own], count = re.subn(f"^{key} = .*", line, files.get(own, ""), flags=re.M)
        if not count:
            raise PlugsftError(f"{place}: this recipe has no key {key}; leave it out")
    recipes = [path for path in files if path.endswith(".toml")]
    if recipes and not (folder / SCHEMA).exists():
        files[SCHEMA] = schema_text() + "\n"
    for path in recipes:
        files[path] = POINTER + files[path]
    # The recipe last: it says that all is there.
    write_files({folder / path: text for path, text in reversed(files.items())})
    return [*files]


def write_files(files: dict[Path, str], option: str = "--to") -> None:
    """Write files, and the folders that they lie in."""
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(path) as temporary:
                temporary.write_text(text, "utf8")
    except OSError as error:
        raise PlugsftError(f"{error.filename or path}: {reason_of(error)}; set {option}") from error


def commands_of(recipe: str) -> list[str]:
    """Return the commands in a recipe's first comment, and what it needs."""
    head = recipe.partition("\n\n")[0]
    return [line.partition(" # ")[0].strip() for line in re.findall(r"^#   (\w.*)", head, re.M)]


def write_skeleton(name: str, folder: Path, kind: str) -> None:
    """Write a package with a working plugin and its test; print the next commands."""
    if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"'{name}': a plugin's name has lower case letters, digits and single underscores, "
            "begins with a letter, and is no Python keyword: for example long_batches"
        )
    plugins = find()
    if is_core(name) or name in plugins:
        owner = plugins[name].origin if name in plugins else "the core"
        raise PluginError(f"'{name}': the name is taken ({owner}); choose another")
    target = folder / f"plugsft-{name.replace('_', '-')}"
    files = [FILES / "pyproject.toml", *sorted(FILES.joinpath(kind).glob("*.*"))]
    code = FILES.joinpath(kind, "plugsft_my_plugin.py").read_text(encoding="utf8")
    words = {
        "SUMMARY": str(ast.get_docstring(ast.parse(code))).rstrip("."),
        "my_plugin": name,
        "my-plugin": name.replace("_", "-"),
        "MyPlugin": "".join(word.capitalize() for word in name.split("_")),
    }
    if target.exists():
        raise PluginError(f"{target} exists already; remove it, or set --folder")
    texts = {target / _rename(file.name, words): file.read_text("utf8") for file in files}
    write_files({path: _rename(text, words) for path, text in texts.items()}, "--folder")
    say(f"written: {target}. Next:")
    for command in (f"cd {shlex.quote(str(target))}", "pip install -e '.[dev]'", "pytest"):
        say(f"  {command}")
    guide = Path(import_module(PLUGIN_PACKAGE).__path__[0]) / "README.md"
    say(f"explained: {guide}")


def _rename(text: str, words: dict[str, str]) -> str:
    for word, new in words.items():
        text = text.replace(word, new)
    return text
