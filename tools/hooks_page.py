"""Write the hooks and the public names into docs/hooks.md: tools/hooks_page.py

Both come from signatures and docstrings. tests/test_plugin_docs.py compares.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import plugsft
from plugsft import data_kit, kit
from plugsft.data.slices import ShardWriter
from plugsft.model.load import ModelLoad
from plugsft.registry.contracts import SPECS

PAGE = Path(__file__).parents[1] / "docs/hooks.md"
BEGIN, END = "<!-- tools/hooks_page.py writes this -->\n", "<!-- to here -->\n"
GROUPS = {
    "check": "Before the run",
    "cache": "From rows to tokens",
    "optimize_model": "The model and its optimizer",
    "add_columns": "From tokens to batches",
    "step": "A step",
    "ready": "The life of a run",
    "state_dict": "What a plugin keeps and reports",
}
"""The first hook of each group -> its heading."""
CLASSES = (ModelLoad, ShardWriter)
"""Classes that `plugsft` names for annotations only."""
WORDS = {
    "Batch": "A dictionary: the inputs of the model, labels, and names with `_` in front for the "
    "loss alone.",
    "Data": "The recipe's table [data].",
    "Folder": "Type of an option: the path of a folder, which need not exist yet.",
    "Ints": "An array of int64.",
    "Place": "Type of an option: a path or a hub name.",
    "Ranks": "The ranks of a run.",
    "Recipe": "A recipe, typed; each table is an attribute.",
    "Run": "What notices see of a run.",
    "RunModel": "The trained model. All ranks must enter its operations together.",
    "Train": "The recipe's table [train].",
    "hookimpl": "Marks a method as a hook: `@hookimpl`, or `@hookimpl(wrapper=True)`.",
}
"""Names whose docstrings are not for authors of plugins."""


def hooks() -> Iterator[str]:
    """Yield the lines of the hooks, in the order of a run."""
    for name, spec in SPECS.items():
        if name in GROUPS:
            yield from ("", f"### {GROUPS[name]}", "")
        arguments = ", ".join([*inspect.signature(spec).parameters][1:])
        kind = "stage" if vars(spec)["plugsft_spec"]["firstresult"] else "notice"
        promise = " ".join(str(inspect.getdoc(spec)).split())
        text = f"- **`{name}({arguments})`**, {kind}. {promise}"
        yield from textwrap.wrap(
            text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def call_of(module: ModuleType, name: str) -> str:
    """Return how a name is used: functions with their arguments, "=" after keyword-only ones."""
    value = getattr(module, name)
    if not inspect.isfunction(value):
        return f"`{name}`"
    parameters = inspect.signature(value).parameters.values()
    words = [each.name + "=" * (each.kind is each.KEYWORD_ONLY) for each in parameters]
    return f"`{name}({', '.join(words)})`"


def names() -> Iterator[str]:
    """Yield the tables of public names."""
    real: dict[str, Any] = {one.__name__: one for one in CLASSES}
    for module in (plugsft, data_kit, kit):
        yield from ("", f"| `{module.__name__}` | |", "|---|---|")
        for name in module.__all__:
            value = real.get(name, getattr(module, name))
            line = WORDS.get(name) or str(inspect.getdoc(value)).partition("\n")[0]
            yield f"| {call_of(module, name)} | {line} |"


def written(page: str) -> str:
    """Return the page with today's hooks and names."""
    parts = re.split(f"({re.escape(BEGIN)}|{re.escape(END)})", page)
    for place, lines in zip((2, 6), (hooks(), names()), strict=True):
        parts[place] = "\n".join(lines).strip("\n") + "\n"
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf8")), "utf8")
