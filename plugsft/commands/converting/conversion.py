"""A configuration of another tool on its way to a recipe, and the rules of the tools' tables."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...base.errors import RecipeError, reason_of
from ...recipe.tables import short

T = TypeVar("T")
UNKNOWN = "not known to plugsft convert; look for it in docs/other_tools.md"
SECRET = re.compile(
    r"(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)tokens?$|(api|access|secret|wandb)_?keys?$"
    r"|passwords?$|secrets?$|credentials?$|^env$",
    re.IGNORECASE,
)
"""Keys whose values are never printed."""
TOKEN = re.compile(r"\b(hf_\w{8,}|sk-[\w-]{8,}|wandb_v1_\w+|[0-9a-f]{40})\b")
"""Values that are secrets, whatever their key: of the hub, and of trackers."""


@dataclass(frozen=True)
class Copy:
    """The value goes to a key of the recipe."""

    to: str
    default: Any = None
    """The tool's own default, which is written if the configuration leaves the key out."""
    read: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class By:
    """A function reads the key, often with others."""

    function: "Callable[[Conversion], None]"
    whole: bool = False
    """It reads all keys below this one, too."""


@dataclass(frozen=True)
class Same:
    """These values need no line in a recipe; any other value is named with the reason."""

    values: tuple[Any, ...]
    """Empty: every value, because the key changes no result."""
    reason: str = ""


@dataclass(frozen=True)
class Named:
    """The key is not converted; the reason ends with what to use."""

    reason: str


Rule = Copy | By | Same | Named
Rules = Mapping[str, Rule]
"""Key of the tool -> rule. A key stands for all keys below it: "fsdp_config"."""


@dataclass
class Line:
    """A line of the recipe, with the settings that it comes from."""

    value: Any
    comment: str


@dataclass
class Conversion:
    """The settings of a configuration, and the recipe's lines so far."""

    tool: str
    path: Path
    settings: dict[str, Any]
    gpus: int = 1
    trainer: str = "sft"
    lines: dict[str, Line] = field(default_factory=dict)
    """Key of the recipe -> its line."""
    left: dict[str, str] = field(default_factory=dict)
    """Key that is not converted -> the reason."""
    same: list[str] = field(default_factory=list)
    """Keys that need no line of their own."""
    remarks: list[str] = field(default_factory=list)
    """What a user should know, though all keys are converted."""
    files: dict[str, str] = field(default_factory=dict)
    """Ending of a file's name -> its text: files that the recipe names."""
    launcher: str = ""
    """The strategy of `plugsft launch`, where it is not ddp."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting by its key, such as "lr_scheduler_kwargs.min_lr_rate"."""
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def first(self, *keys: str) -> str:
        """Return the first of several names of a setting that is set, else the first name."""
        return next((key for key in keys if self.get(key) is not None), keys[0])

    def number(self, key: str, default: float) -> float:
        """Return a number, which may be written in quotes."""
        return self.read(key, default, number)

    def whole(self, key: str, default: int) -> int:
        """Return a whole number."""
        return self.read(key, default, whole)

    def read(self, key: str, default: Any, read: Callable[[Any], T]) -> T:
        """Return a setting as `read` reads it; name the key if it cannot."""
        value = self.get(key, default)
        try:
            return read(value)
        except (ValueError, TypeError) as error:
            raise RecipeError(f"{self.path}: {key} = {short(value)}: {error}") from error

    def on(self, key: str, default: bool = False) -> bool:
        """Tell whether a switch is on."""
        return self.read(key, default, switch)

    def set(self, to: str, value: Any, *keys: str, comment: str = "") -> None:
        """Write a line of the recipe, with the settings that it comes from as its comment."""
        origins = [f"{key}: {_spell(self.get(key))}" for key in keys if self.get(key) is not None]
        if keys and not origins:
            origins = [f"{self.tool}'s default"]
        self.lines[to] = Line(value, "; ".join([*origins, *filter(None, [comment])]))

    def plugin(self, table: str, /, *keys: str, comment: str = "", **options: Any) -> None:
        """Write a plugin's table."""
        if not options:
            self.set(f"plugins.{table}", {}, *keys, comment=comment)
        for option, value in options.items():
            self.set(f"plugins.{table}.{option}", value, *keys, comment=comment)

    def leave(self, key: str, reason: str) -> None:
        """Name a key that is not converted."""
        self.left.setdefault(key, reason)

    def refuse(self, key: str, reason: str) -> RecipeError:
        """Return the error for a run that plugsft cannot do."""
        return RecipeError(f"{self.path}: {key} = {short(self.get(key))}: {reason}")

    def names(self, key: str) -> bool:
        """Tell whether a comment or a remark names a key."""
        texts = [*(line.comment for line in self.lines.values()), *self.left, *self.remarks]
        return key in self.left or any(re.search(rf"\b{key}\b", text) for text in texts)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield all keys with a value: ("datasets[0].path", "chats.jsonl")."""
        yield from flat(self.settings)

    def shown(self, key: str) -> str:
        """Return a key's value as the report shows it."""
        value = dict(self.items()).get(key)
        if any(SECRET.search(part) for part in re.split(r"[.\[\]]", key)):
            return "..."
        return "{...}" if value is None else TOKEN.sub("...", short(value))


def number(value: Any) -> float:
    """Read a number; YAML reads 1e-5 as a text. Keep whole numbers whole."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("it should be a number")
    read = float(value)
    if not math.isfinite(read):
        raise ValueError("it should be a finite number")
    return int(read) if read.is_integer() and abs(read) < 2**53 else read


def whole(value: Any) -> int:
    """Read a whole number."""
    read = number(value)
    if not isinstance(read, int):
        raise ValueError("it should be a whole number")
    return read


def switch(value: Any) -> bool:
    """Read a switch, which may be written in quotes."""
    if isinstance(value, int | float) and value not in (0, 1):
        raise ValueError("it should be true or false")
    return value in (True, "true", "True", "auto")


def share(value: Any) -> float:
    """Read a share of the run."""
    read = number(value)
    if not 0 <= read < 1:
        raise ValueError("it should be a share: at least 0, and less than 1")
    return read


def name(value: Any) -> str:
    """Read a name, which YAML may take for a number."""
    if not isinstance(value, str | int | float):
        raise ValueError("it should be a text")
    return str(value)


def real(value: Any) -> float:
    """Read a number that the recipe writes with a point."""
    return float(number(value))


def printable(text: str) -> str:
    """Return a text for a comment, where TOML has no control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of nested settings, without empty ones."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{key}[{index}]")
    elif value is not None and value not in ([], {}, ""):
        yield key, value


def rule_of(key: str, rules: Rules) -> Rule | None:
    """Return the rule of a key, or of the nearest key above it."""
    name = re.sub(r"\[\d+\]", "[]", key)
    while name and name not in rules:
        name = name.removesuffix("[]") if name.endswith("[]") else name.rpartition(".")[0]
    return rules.get(name)


def _is_below(key: str, rules: Rules) -> bool:
    """Tell whether the rule of a key is one of a key above it."""
    return re.sub(r"\[\d+\]", "[]", key) not in rules


def apply(rules: Rules, conversion: Conversion) -> None:
    """Convert all settings; name those that have no meaning in a recipe."""
    for function in dict.fromkeys(rule.function for rule in rules.values() if isinstance(rule, By)):
        try:
            function(conversion)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            keys = [
                key for key, rule in rules.items() if rule in (By(function), By(function, True))
            ]
            names = ", ".join(key for key in keys if conversion.get(key) is not None)
            raise RecipeError(
                f"{conversion.path}: {names}: not values that {conversion.tool} takes "
                f"({reason_of(error)}); correct them"
            ) from error
    for key, rule in rules.items():
        if isinstance(rule, Copy):
            _copy(key, rule, conversion)
    for key, value in conversion.items():
        match rule_of(key, rules):
            case None:
                conversion.leave(key, UNKNOWN)
            case Named(reason):
                conversion.leave(key, reason)
            case Same(values, reason) if values and value not in values:
                conversion.leave(key, reason)
            case Same():
                conversion.same.append(key)
            case By(whole=False) if _is_below(key, rules):
                conversion.leave(key, UNKNOWN)
            case By() if not ({"[", "."} & {*key} or conversion.names(key)):
                conversion.same.append(key)


def _copy(key: str, rule: Copy, conversion: Conversion) -> None:
    if conversion.get(key, rule.default) is None:
        return
    read = conversion.read(key, rule.default, rule.read or (lambda value: value))
    if read is not None:
        conversion.set(rule.to, read, key)


def _spell(value: Any) -> str:
    """Return a value as YAML spells it, in one short line."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    line = printable(TOKEN.sub("...", " ".join(text.split())))
    return line if len(line) <= 60 else line[:57] + "..."
