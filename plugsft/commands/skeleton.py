"""The skeleton of a new plugin: a distribution in skeleton_files/, under another name."""

import ast
import keyword
import re
import shlex
from importlib import import_module
from pathlib import Path

from ..base.console import say
from ..base.errors import PluginError, reason_of
from ..hooks import is_core
from ..registry.discover import PLUGIN_PACKAGE, find

FILES = Path(__file__).with_name("skeleton_files")
"""A folder for each kind of plugin, and the pyproject.toml that they share."""


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
    try:
        target.mkdir(parents=True)
        for file in files:
            text = file.read_text(encoding="utf8")
            (target / _rename(file.name, words)).write_text(_rename(text, words), encoding="utf8")
    except FileExistsError as error:
        raise PluginError(f"{error.filename} exists already; remove it, or set --folder") from None
    except OSError as error:
        raise PluginError(
            f"{error.filename or target}: {reason_of(error)}; set --folder"
        ) from error
    say(f"written: {target}. Next:")
    for command in (f"cd {shlex.quote(str(target))}", "pip install -e '.[dev]'", "pytest"):
        say(f"  {command}")
    guide = Path(import_module(PLUGIN_PACKAGE).__path__[0]) / "README.md"
    say(f"every hook, explained: {guide}")


def _rename(text: str, words: dict[str, str]) -> str:
    for word, new in words.items():
        text = text.replace(word, new)
    return text
