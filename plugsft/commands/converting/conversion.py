"""What another tool sets, on its way to a recipe: its keys, sources, and tables in keys.toml."""

import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from ...base.errors import PlugsftError, RecipeError, reason_of
from ...base.types import Rows
from ...data.sources import open_source
from ...recipe.tables import Source, short

T = TypeVar("T", bool, int, float, str)
Table: TypeAlias = dict[str, Any]
"""A table of settings, or of a recipe."""
UNKNOWN = "not known to plugsft convert; docs/reference.md has all keys"
SECRET = re.compile(
    r"(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)tokens?$|(api|access|secret|wandb)_?keys?$"
    r"|passwords?$|secrets?$|credentials?$|^env$",
    re.IGNORECASE,
)
"""Keys whose values are never printed."""
TOKEN = re.compile(r"\b(hf_\w{8,}|sk-[\w-]{8,}|wandb_v1_\w+|[0-9a-f]{40})\b")
"""Values that are secrets, whatever their key: of the hub, and of trackers."""
READERS: dict[type, TypeAdapter[Any]] = {
    bool: TypeAdapter(bool),
    int: TypeAdapter(int),
    float: TypeAdapter(FiniteFloat),
    str: TypeAdapter(str, config={"coerce_numbers_to_str": True}),
}
"""Type -> how it is read: YAML takes 1e-5 for a text, and a name for a number."""
KEYS: dict[str, Table] = tomllib.loads(Path(__file__).with_name("keys.toml").read_text("utf8"))
"""Section -> its tables; the file says what they hold."""
EMPTY: Table = {
    "text": "",
    "number": 0.0,
    "count": 0,
    "yes or no": False,
    "plugin": False,
}
"""Kind of a copied key -> the value that needs no line."""
NO_LINE_TABLES = ("same", "eval", "lora", "liger", "dpo", "simpo", "kto", "reward")
"""Tables of keys that need no line; all but the first where their part of a run is off."""


def copied(table: str, *sections: str) -> dict[str, Table]:
    """Key -> how it is copied, of a table that several sections may have."""
    return {key: rule for section in sections for key, rule in KEYS[section][table].items()}


@dataclass
class Line:
    """A line of the recipe, with the settings that it comes from."""

    value: Any
    comment: str


NO_LINE = Line(None, "")


@dataclass
class Conversion:
    """The settings of a configuration, and the recipe's lines so far."""

    tool: str
    path: Path
    settings: Table
    gpus: int = 1
    trainer: str = "sft"
    lines: dict[str, Line] = field(default_factory=dict)
    """Key of the recipe -> its line."""
    left: dict[str, str] = field(default_factory=dict)
    """Key that is not converted -> the reason."""
    remarks: list[str] = field(default_factory=list)
    """What a user should know, though all keys are converted."""
    launcher: str = ""
    """The strategy of `plugsft launch`, where it is not ddp."""
    read_keys: list[str] = field(default_factory=list)

    @cached_property
    def flat(self) -> Table:
        """Key -> value, of nested settings too: "datasets[0].path"."""
        return dict(flat(self.settings))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting by its key, such as "datasets[0].path"."""
        self.read_keys.append(key)
        value = self.flat.get(key)
        return default if value is None else value

    def first(self, *keys: str) -> str:
        """Return the first of several names of a setting that is set, else the first name."""
        return next((key for key in keys if self.get(key) is not None), keys[0])

    def read(self, key: str, default: T) -> T:
        """Return a setting in the type of its default: YAML reads 1e-5 as a text."""
        value = self.get(key, default)
        kind = type(default)
        if kind is bool and value == "auto":
            value = True
        elif kind is str and value is False:
            value = "no"  # as YAML takes it
        try:
            made: T = READERS[kind].validate_python(value)
        except ValidationError as error:
            why = error.errors()[0]["msg"].replace("Input should", "it should")
            raise self.refuse(key, why) from error
        return made

    def names(self, key: str) -> list[str]:
        """Return the names of a setting: a list, or a text with commas."""
        value = self.get(key, "")
        names = value.split(",") if isinstance(value, str) else value
        return [str(name).strip() for name in names if str(name).strip()]

    def set(self, to: str, value: Any, *keys: str, comment: str = "") -> None:
        """Write a line of the recipe, with the settings that it comes from as its comment."""
        origins = [f"{key}: {_spell(self.get(key))}" for key in keys if self.get(key) is not None]
        if keys and not origins:
            origins = [f"{self.tool}'s default"]
        self.lines[to] = Line(value, "; ".join([*origins, *filter(None, [comment])]))

    def copy(self, table: str, *sections: str) -> None:
        """Write the lines of keys that mean the same in both tools."""
        for key, rule in copied(table, *sections).items():
            to, kind = rule["to"], rule.get("kind")
            if kind is None:
                self.set(to, self.read(key, rule["default"]), key)
                continue
            value = self.names(key) if kind == "names" else self.read(key, EMPTY[kind])
            if value:
                self.set(to, rule.get("value", {}) if kind == "plugin" else value, key)

    def switch(self, plugin: str, key: str) -> None:
        """Write the table of a plugin without options, if a key switches it on."""
        if self.read(key, False):
            self.set(plugin, {}, key)

    def value(self, to: str) -> Any:
        """Return what a line of the recipe holds so far, or None."""
        return self.lines.get(to, NO_LINE).value

    def leave(self, key: str, reason: str) -> None:
        """Name a key that is not converted."""
        self.left.setdefault(key, reason)

    def leave_evaluations(self, key: str, reason: str) -> None:
        """Name the key of rows for evaluations that is not converted, and all that needs them."""
        self.leave(key, reason)
        for other in KEYS["shared"]["of_evaluations"]:
            if self.get(other):
                self.leave(other, f"{key}, which it needs, is not converted; use eval.source")

    def require(self, key: str) -> None:
        """Refuse a configuration without a setting."""
        if not self.get(key):
            raise RecipeError(f"{self.path}: {key} is missing; set {key}")

    def refuse(self, key: str, reason: str) -> RecipeError:
        """Return the error for a run that plugsft cannot do."""
        return RecipeError(f"{self.path}: {key} = {short(self.get(key))}: {reason}")

    def shown(self, key: str) -> str:
        """Return a key's value as the report shows it."""
        if any(SECRET.search(part) for part in re.split(r"[.\[\]]", key)):
            return "..."
        return "{...}" if _holds_keys(self.get(key)) else _spell(self.get(key))


@dataclass(frozen=True)
class Tool:
    """A tool's keys: those that take thought, and the tables of all others.

    A key of a table stands for all keys below it: "fsdp_config".
    """

    name: str
    convert: Callable[[Conversion], None]
    """Writes the lines of the recipe; what it reads is converted, or left with a reason."""
    sections: tuple[str, ...]
    """Its tables in keys.toml; its own are the last."""

    @cached_property
    def unlike(self) -> Mapping[str, str]:
        """Key -> why it is not converted, and what to use. False and 0 need no line, unless the
        key has usual values."""
        return {key: reason for reason, keys in self._all("unlike") for key in keys}

    @cached_property
    def usual(self) -> Mapping[str, list[Any]]:
        """Key -> the values that need no line."""
        return dict(self._all("usual"))

    @cached_property
    def same(self) -> Collection[str]:
        """Keys that need no line: they change no result, or belong to a part that is off."""
        same = set[str]()
        for section in self.sections:
            for table in NO_LINE_TABLES:
                same.update(KEYS[section].get(table, ()))
        return same

    def _all(self, table: str) -> Iterator[tuple[str, list[Any]]]:
        for section in self.sections:
            yield from KEYS[section].get(table, {}).items()

    def apply(self, c: Conversion) -> None:
        """Convert all settings; name those that have no meaning in a recipe."""
        try:
            self.convert(c)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            key = c.read_keys[-1]
            raise c.refuse(
                key, f"not a value that {c.tool} takes ({reason_of(error)}); correct it"
            ) from error
        for key, value in c.flat.items():
            if key in c.read_keys or _holds_keys(value) or value in (None, [], {}, ""):
                continue
            if reason := self._reason(key, value):
                c.leave(key, reason)

    def _reason(self, key: str, value: Any) -> str:
        """Return why a key is not converted, by the nearest key above it that is in a table."""
        name = re.sub(r"\[\d+\]", "[]", key)
        while name:
            if name in self.same or value in self.usual.get(name, ()):
                return ""
            if name in self.unlike:
                return self.unlike[name] if value or name in self.usual else ""
            name = name.removesuffix("[]") if name.endswith("[]") else name.rpartition(".")[0]
        return UNKNOWN


def printable(text: str) -> str:
    """Return a text for a comment, where TOML has no control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of nested settings."""
    if key:
        yield key, value
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}" if key else str(name))
    elif _holds_keys(value):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{key}[{index}]")


def _holds_keys(value: Any) -> bool:
    """Tell whether a value is a table, or a list with tables."""
    several = value if isinstance(value, list) else [value]
    return any(isinstance(each, Mapping) and each for each in several)


def _spell(value: Any) -> str:
    """Return a value as YAML spells it, in one short line."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    line = printable(TOKEN.sub("...", " ".join(text.split())))
    return line if len(line) <= 60 else line[:57] + "..."


def part(source: object, split: object = None, weight: float = 1.0) -> Table:
    """Return a table of data.sources, without its defaults."""
    table: Table = {"source": str(source)}
    if split not in (None, "", "train"):
        table["split"] = str(split)
    return table if weight == 1.0 else {**table, "weight": weight}


def with_subset(source: Any, subset: Any) -> Any:
    """Return the name of a data set on the hub with that of its subset."""
    return f"{source}:{subset}" if source and subset not in (None, "default") else source


def listed_parts(
    c: Conversion, key: str, columns: Mapping[str, Mapping[str, str]] | None = None
) -> list[Table]:
    """Return the sources of a list of data sets, as axolotl and TRL write it.

    `columns`: those of each place in the list, where they differ.
    """
    parts = []
    for place in places(c, key):
        path = c.get(f"{place}.path", c.get(f"{place}.id"))
        path = with_subset(path, c.get(f"{place}.config", c.get(f"{place}.name")))
        files = c.get(f"{place}.data_files", path)
        if files is None:
            raise RecipeError(f"{c.path}: {place} has no path; set it")
        split, weight = c.get(f"{place}.split"), c.read(f"{place}.weight", 1.0)
        files = files if isinstance(files, list) else [files]
        own = {"columns": columns[place]} if columns and columns[place] else {}
        parts += [part(name, split, weight) | own for name in files]
    return parts


def places(c: Conversion, key: str) -> list[str]:
    """Return the keys of a list's tables."""
    return [f"{key}[{index}]" for index in range(len(c.get(key)))]


def set_eval_source(c: Conversion, sources: list[Table], key: str) -> None:
    """Write the source of evaluations that `part` returned."""
    if len(sources) > 1:
        c.leave_evaluations(key, "[eval] has one source; use eval.source with a file of all rows")
        return
    c.set("eval.source", sources[0]["source"], key)
    c.set("eval.split", sources[0].get("split", "train"))


def set_sources(c: Conversion, sources: list[Table], key: str) -> None:
    """Write the sources that `part` returned."""
    keys = [key] if isinstance(c.get(key), str) else []
    if len(sources) != 1 or "weight" in sources[0]:
        c.set("data.sources", sources, *keys)
        return
    for option, value in sources[0].items():
        c.set(f"data.{option}", value, *keys)


@cache
def rows_of(name: str) -> Rows | None:
    """Return the rows of a file that lies here."""
    try:
        return (open_source(Source(source=name)) or None) if Path(name).is_file() else None
    except (OSError, PlugsftError):
        return None


def last_rows(size: float, path: str) -> str:
    """Return where the last rows of a split begin, as a slice has it; empty if it cannot be."""
    percent = round(100 - 100 * size, 6)
    if size < 1 and percent.is_integer() and percent < 100:
        return f"{percent:g}%"
    known = rows_of(path)
    rows = max(1, round(len(known) * size)) if known and size < 1 else size
    return "" if rows % 1 else f"-{rows:g}"


def hold_out(c: Conversion, key: str, size: float) -> None:
    """Hold rows out for evaluations; name the key if that cannot be written."""
    source, split = c.value("data.source"), c.value("data.split") or "train"
    middle = last_rows(size, source) if source and "[" not in split else ""
    if not middle:
        c.leave_evaluations(
            key,
            'no split can be written for it; use split = "train[:95%]" in [data], or in one of '
            '[[data.sources]], whose file is then eval.source, and eval.split = "train[95%:]"',
        )
        return
    c.set("data.split", f"{split}[:{middle}]", key)
    c.set("eval.split", f"{split}[{middle}:]", key, comment=f"{c.tool} draws these rows at random")
