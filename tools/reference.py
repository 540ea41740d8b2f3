"""Write docs/reference.md from the schema of recipes: .venv/bin/python tools/reference.py"""

import re
from pathlib import Path
from textwrap import fill
from typing import Any

from plugsft.commands.overview import claims_of, make_schema, table_in, type_in_words
from plugsft.recipe.explain import value_of
from plugsft.registry.discover import BUNDLED, find, load_class

PAGE = Path(__file__).resolve().parent.parent / "docs/reference.md"
INTRODUCTION = """\
`tools/reference.py` writes this page from `plugsft schema`, which an editor reads to complete and
to check a recipe. In a terminal, `plugsft plugins lora` prints the options of a plugin, and
`plugsft show my.toml` every key of a recipe with its value. [train.md](train.md) says how recipes
are written, and [benchmarks.md](benchmarks.md) what was measured of plugins.

A **required** key must be set where its table is there. With the default none, nothing is set.
Texts stand in quotes. Paths may begin with `~` and hold `${NAME}`, an environment variable. Every
plugin also takes `enabled`: `false` keeps its table and switches the plugin off."""
TABLES = {
    "[model]": "Model",
    "[model.scratch]": "Scratch",
    "[data]": "Data",
    "[[data.sources]]": "Source",
    "[train]": "Train",
    "[eval]": "Eval",
    "[checkpoint]": "Checkpoint",
}
"""The tables of a recipe in the order in which recipes have them, and their names in the schema."""
GROUPS = {
    "Preparing data": {
        "multiprocess_tokenize": "prepare.md",
        "ray_tokenize": "prepare.md",
        "fast_tokenizer": "speed.md",
        "arrow_cache": "prepare.md",
    },
    "Speed and memory": {
        "bfd_packing": "speed.md",
        "length_group": "speed.md",
        "async_collate": "speed.md",
        "flash_attention": "speed.md",
        "fused_loss": "speed.md",
        "liger": "speed.md",
        "compile": "speed.md",
        "gradient_checkpointing": "speed.md",
        "activation_offload": "speed.md",
        "fp8": "speed.md",
    },
    "Adapters and experts": {
        "lora": "lora.md",
        "quantize": "lora.md",
        "router_loss": "experts.md",
    },
    "Optimizers, schedules and averages": {
        "low_memory_adam": "optimizers.md",
        "torch_optimizer": "optimizers.md",
        "hf_schedule": "train.md",
        "ema": "optimizers.md",
    },
    "Preferences and rewards": {
        "dpo": "preferences.md",
        "dpo_reference": "preferences.md",
        "kto": "preferences.md",
        "reward": "preferences.md",
    },
    "Watching and ending a run": {
        "early_stopping": "checkpoints.md",
        "samples": "watch.md",
        "profiler": "speed.md",
        "tracker": "watch.md",
        "push": "watch.md",
    },
}
"""The bundled plugins by what they are for, and the page that explains each."""
CLAIMS = ("needs", "requires", "refuses", "affects results")


def page() -> str:
    """The text of the page."""
    found = {name: one for name, one in find().items() if one.origin == BUNDLED}
    schema = make_schema(found)
    plugins = schema["properties"].pop("plugins")["properties"]
    assert sorted(plugins) == sorted(name for group in GROUPS.values() for name in group)
    own = tuple(table.strip("[]") for table in TABLES)
    top = {name: key for name, key in schema["properties"].items() if name not in own}
    above = {**schema, "properties": top, "description": "Keys that stand above all tables."}
    head = ["# Every key of a recipe, and every option of a plugin"]
    head += map(wrapped, INTRODUCTION.split("\n\n"))
    contents = ["- A recipe: " + ", ".join(["[its top](#top-of-a-recipe)", *map(link, TABLES)])]
    sections = [section("Top of a recipe", above)]
    sections += [section(f"`{table}`", schema["$defs"][name]) for table, name in TABLES.items()]
    for group, names in GROUPS.items():
        contents.append(f"- {group}: " + ", ".join(link(f"[plugins.{name}]") for name in names))
        sections.append(f"## {group}\n")
        for name, of in names.items():
            claims = claims_of(load_class(found[name]))
            said = "; ".join(f"{word}: {claims[word]}" for word in CLAIMS if word in claims)
            more = f"Explained in [{of}]({of}); {said}."
            table = table_in(schema, plugins[name])
            sections.append(section(f"`[plugins.{name}]`", table, "#", more))
    return "\n\n".join([*head, "\n".join(map(wrapped, contents)), "\n".join(sections)])


def link(table: str) -> str:
    """A link to the section of a table."""
    name = table.strip("[]").removeprefix("plugins.")
    return f"[`{name}`](#{re.sub('[^a-z0-9_]', '', table.lower())})"


def wrapped(line: str) -> str:
    """A paragraph or an entry of a list, in lines of 120 characters."""
    indent = "  " * line.startswith("- ")
    return fill(" ".join(line.split()), 120, subsequent_indent=indent, break_on_hyphens=False)


def section(title: str, table: dict[str, Any], deeper: str = "", more: str = "") -> str:
    """The keys of a table, below what it says of itself."""
    parts = [f"##{deeper} {title}"]
    for paragraph in filter(None, [*table["description"].split("\n\n"), more]):
        parts.append("\n".join(map(wrapped, re.split(r"\n(?=- )", paragraph))))
    keys = {name: key for name, key in table["properties"].items() if name != "enabled"}
    rows = [row(name, key, name in table.get("required", ())) for name, key in keys.items()]
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n\n".join([*parts, "\n".join([*head, *rows]) if rows else "It has no options."]) + "\n"


def row(name: str, key: dict[str, Any], required: bool) -> str:
    """The line of one key."""
    text = key.get("description", "").replace("\n", " ")
    meaning, _, rest = text.partition("Default: ")
    default, _, more = rest.partition(". ")
    default = default.removesuffix(".") or ("**required**" if required else "none")
    if value_of(default) != default:  # a value as recipes write it, not words
        default = f"`{default}`"
    meaning, kind = (meaning + more).strip(), re.sub('"[^"]*"', r"`\g<0>`", type_in_words(key))
    if kind.count("`") > 8:
        kind, meaning = "text", f"{meaning} One of {kind}."
    return f"| `{name}` | {kind} | {default} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
