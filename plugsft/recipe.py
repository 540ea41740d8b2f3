"""The recipe: TOML in, typed objects out, and every mistake of a file in one go."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from .errors import RecipeError, did_you_mean

Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "inverse_sqrt",
    "linear",
    "polynomial",
    "warmup_stable_decay",
]


def _usable(place: str) -> str:
    if not place:
        raise ValueError("given ''; it should be a name or a path")
    expanded = os.path.expanduser(place)
    try:
        expanded.encode()
        os.stat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        pass  # a name on the hub, or a folder that is still to be made
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"given {_short(place)}; it cannot be a path: {reason}") from error
    return expanded


Place = Annotated[str, AfterValidator(_usable)]
"""A path, with ~ for the home folder, or a name on the hub."""
TRL = "trl"
"""In model.chat_template: trl's training variant of the model's own."""
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Table(BaseModel):
    """One table of a recipe."""

    # defer_build: `import plugsft` need not pay for validators that it may never use.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        defer_build=True,
    )


class Scratch(Table):
    """A small new decoder of the Llama kind, and a tokenizer trained on the recipe's data."""

    hidden: int = Field(256, ge=8, le=65_536)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1, le=1_000)
    """Decoder layers."""
    heads: int = Field(4, ge=1, le=65_536)
    """Attention heads; they divide `hidden` into even widths."""
    kv_heads: Count | None = None
    """Heads of keys and values; as many as `heads` unless said."""
    mlp: int | None = Field(None, ge=8, le=1_000_000)
    """Width inside the MLP; four times `hidden` unless said."""
    vocab: int = Field(2048, ge=300, le=1_000_000)
    """Most entries the new byte-level BPE tokenizer may have."""
    context: int = Field(512, ge=8, le=10_000_000)
    """Longest sequence, in tokens."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden ({self.hidden}) must be an even multiple of heads")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads")
        return self


class Model(Table):
    """Which model to train."""

    path: Place | None = None
    """A hub name or a folder."""
    scratch: Scratch | None = None
    """Start a new small model instead."""
    revision: str | None = None
    """Branch, tag or commit of a hub name."""
    tokenizer: Place | None = None
    """A hub name or a folder, where the tokenizer is not the model's own."""
    chat_template: Place | None = None
    """A Jinja file that replaces the tokenizer's chat template; or "trl": trl's training variant
    of it, which writes every turn alike and marks the assistant's. Saved with the model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give either path (a hub name or a folder) or [model.scratch]")
        return self


class Source(Table):
    """One of several sources."""

    source: Place
    """A hub name, a folder, or a jsonl, json, parquet or arrow file."""
    split: str = "train"
    """Split of a hub name or folder; slices as in datasets: "train[:1000]", "train[-5%:]"."""
    weight: float = Field(1.0, gt=0, le=1_000)
    """How often an epoch takes each row: 0.5 takes a new random half, 2 takes all rows twice."""


class Data(Table):
    """What to train on."""

    source: Place | None = None
    """A hub name, a folder, or a jsonl, json, parquet or arrow file."""
    split: str = "train"
    """Split of a hub name or folder; slices as in datasets: "train[:1000]", "train[-5%:]"."""
    sources: list[Source] | None = Field(None, min_length=1)
    """A mixture, in place of `source`."""
    tokens: Place | None = None
    """A folder that `plugsft prepare` gave; beside it, `source` may be left out, or far away."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names that plugsft knows -> your columns: {messages = "dialogue"}."""
    max_length: int = Field(4096, ge=2, lt=2**31)
    """Longest example, in tokens."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a longer one; the count is always reported."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Trained turns: the assistant's, its last one, or every token."""
    on_bad_row: Literal["error", "drop"] = "error"
    """Whether a row that cannot be used stops the run, or is left out and counted."""
    template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables for the chat template."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.source and self.sources:
            raise ValueError("give either source or [[data.sources]]")
        if not (self.source or self.sources or self.tokens):
            raise ValueError("give source, [[data.sources]], or tokens")
        if self.sources and self.split != "train":
            raise ValueError("split belongs into each of [[data.sources]]")
        return self

    def all_sources(self) -> list[Source]:
        """Return the mixture, of one source in most recipes."""
        if self.source:
            return [Source(source=self.source, split=self.split)]
        return self.sources or []


class Eval(Table):
    """Evaluation while training."""

    every: Count = 100
    """Steps between evaluations; there is always one at the end."""
    source: Place | None = None
    """A second source; the training source if not given."""
    split: str = "train"
    """Its split, or slice."""


class Train(Table):
    """How to train."""

    batch_size: Count
    """Examples per optimizer step, over all ranks; it does not depend on the machine."""
    learning_rate: float = Field(ge=0, allow_inf_nan=False)
    """Peak learning rate."""
    micro_batch: Count = 1
    """Examples per rank at a time: changes memory and speed, never what is learned."""
    epochs: Count = 1
    """Times each example is seen."""
    steps: Count | None = None
    """Stop after so many steps instead, be it within an epoch or after many."""
    schedule: Schedule = "linear"
    """Learning-rate schedule, by its name in transformers."""
    schedule_options: dict[str, JsonValue] = Field(default_factory=dict)
    """The schedule's own options: {min_lr_rate = 0.1} for cosine_with_min_lr."""
    warmup: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Warm-up: a share of all steps below 1, a number of steps from 1 on."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay; norms and biases are left out."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's decay of the square."""
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    """AdamW's term against division by zero."""
    max_grad_norm: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Clip gradients to this norm; 0 does not clip."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random follows from it."""
    log_every: Count = 10
    """Steps between console lines; metrics.jsonl has every step."""


class Checkpoint(Table):
    """What is kept to go on from."""

    every: int | None = Field(None, ge=0, lt=2**31)
    """Steps between checkpoints: a tenth of the run, but 500 at most, unless said; 0 saves at the
    end, and when the run is stopped, only."""
    keep: Count = 3
    """How many of the latest to keep."""

    def interval(self, steps: int) -> int:
        """Return the steps between the checkpoints of a run; 0 means at the end only."""
        return min(500, -(-steps // 10)) if self.every is None else self.every

    def describe(self, steps: int) -> str:
        """Say when the checkpoints of a run are written."""
        every = self.interval(steps)
        return f"every {every:,} steps, the last {self.keep} kept" if every else "at the end only"


class Recipe(Table):
    """A whole run."""

    output: Place
    """Folder that receives everything the run leaves behind."""
    model: Model
    data: Data
    train: Train
    eval: Eval | None = None
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    plugins: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Active plugins by name, with their options."""

    @model_validator(mode="after")
    def _evaluates_on_something(self) -> Self:
        if self.eval and not self.eval.source and not self.data.source:
            raise ValueError("eval.source: missing; without data.source it must be set")
        if self.data.tokens and self.model.scratch and not self.model.tokenizer:
            raise ValueError(
                "data.tokens: [model.scratch] would train another tokenizer; name the "
                "one of these tokens in model.tokenizer"
            )
        return self

    def has(self, plugin: str) -> bool:
        """Tell whether a plugin is active."""
        return plugin in self.plugins

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.output)


def read(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe file, and set `key.path=value` overrides in it."""
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # TOML's, UTF-8's, and int's limit of digits
        raise RecipeError(f"{path}: is not TOML: {error}") from error
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key.strip():
            raise RecipeError(f"'{override}': an override is written key.path=value")
        _put(raw, key.strip().split("."), _value(text), override)
    return raw


def validate(raw: Mapping[str, Any], path: str | Path) -> tuple[Recipe | None, list[str]]:
    """Check the core's tables; return the recipe, or what is wrong with it."""
    try:
        return Recipe.model_validate(raw), []
    except ValidationError as error:
        return None, explain(error.errors(include_url=False), Recipe, str(path), ())


def explain(
    errors: Sequence[ErrorDetails], table: type[Any], path: str, prefix: tuple[str, ...]
) -> list[str]:
    """Turn pydantic's errors into lines: file, key path, what was given, what is allowed."""
    lines: dict[str, str] = {}
    for error in errors:
        place = _keys(error["loc"], table)
        key = ".".join((*prefix, *map(_key, place)))
        given, context, kind = error["input"], error.get("ctx", {}), error["type"]
        if kind in ("extra_forbidden", "unexpected_keyword_argument"):
            allowed = [name for name, _ in fields(_table_at(table, place[:-1]))]
            hint = did_you_mean(str(place[-1]), allowed) or _elsewhere(str(place[-1]), table)
            known = f"allowed: {', '.join(allowed)}" if allowed else "it has no options"
            what = f"unknown key (given {_short(given)}){hint} {known}"
        elif kind.startswith("missing"):
            what = "missing; it must be set"
        elif kind == "literal_error":
            expected = context["expected"]
            hint = did_you_mean(str(given), re.findall("'(.*?)'", expected)) or ";"
            what = f"given {_short(given)}{hint} allowed: {expected}"
        elif kind == "value_error":
            what = str(context["error"])
        elif kind in ("model_type", "dict_type", "dataclass_type"):
            what = f"given {_short(given)}; it should be a table"
        else:
            what = f"given {_short(given)}; {error['msg'].replace('Input should', 'it should')}"
        if key in lines:  # the next branch of a union
            lines[key] += f", or {what.partition('; ')[2]}"
        else:
            lines[key] = what
    return [f"{path}: {key or 'the recipe'}: {what}" for key, what in lines.items()]


def _keys(loc: Sequence[int | str], table: type[Any] | None) -> Sequence[int | str]:
    """Cut off what pydantic adds to a place that is no key: the branch of a union."""
    for depth, part in enumerate(loc):
        kind = dict(fields(table)).get(str(part))
        branches = [branch for branch in get_args(kind) if branch is not NoneType]
        if get_origin(kind) in (Union, UnionType) and len(branches) > 1:
            return loc[: depth + 1]
        table = _table_at(table, [part])
    return loc


def _key(part: int | str) -> str:
    text = str(part)
    return text if re.fullmatch(r"[\w-]+", text) else repr(text)


def fields(table: type[Any] | None) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a table and their types: a model's, or a plugin's options."""
    for name, info in getattr(table, "__pydantic_fields__", {}).items():
        if info.init is not False:
            yield name, info.annotation


def flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"train.seed": 0, ...}."""
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def resolved(recipe: Recipe) -> str:
    """Return the recipe as TOML with everything in it; it runs again, from any folder."""
    return tomli_w.dumps(anchored(recipe))


def anchored(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's tables with absolute paths."""
    tables = recipe.model_dump(exclude_none=True)
    tables["output"] = str(recipe.folder.absolute())
    model, data = tables["model"], tables["data"]
    for table in (model, data, tables.get("eval", {}), *data.get("sources", [])):
        for name in {"path", "tokenizer", "chat_template", "source", "tokens"} & table.keys():
            # The variant of a chat template is no place, whatever lies here under its name.
            if Path(table[name]).exists() and (name, table[name]) != ("chat_template", TRL):
                table[name] = str(Path(table[name]).absolute())
    if "sources" in data:
        del data["split"]
    return tables


def _put(raw: Any, keys: list[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys):
        index: Any = key
        if isinstance(raw, list) and key.isdigit() and int(key) < len(raw):
            index = int(key)
        elif isinstance(raw, dict):
            raw.setdefault(key, {})
        else:
            where = ".".join(keys[:depth])
            raise RecipeError(f"'{override}': {where} is no table, so it has no '{key}'")
        table, raw = raw, raw[index]
    table[index] = value


def _value(text: str) -> Any:
    """Read a value as TOML; what is not TOML is a bare string, so that paths need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _table_at(table: type[Any] | None, place: Sequence[int | str]) -> type[Any] | None:
    for part in place:
        if isinstance(part, int):
            continue
        kind = dict(fields(table)).get(str(part))
        inner = [kind, *get_args(kind), *(a for b in get_args(kind) for a in get_args(b))]
        tables = (t for t in inner if isinstance(t, type) and issubclass(t, BaseModel))
        table = next(tables, None)
    return table


def _elsewhere(key: str, table: type[Any]) -> str:
    """Find a key that stands in another table than the one it belongs to."""
    for name, _ in fields(table):
        if key in dict(fields(_table_at(table, [name]))):
            return f"; did you mean '{name}.{key}'?"
    return ";"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        return "a number of more digits than Python writes"
    return text if len(text) <= 60 else text[:57] + "..."
