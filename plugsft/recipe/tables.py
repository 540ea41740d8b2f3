"""The recipe: TOML in, typed objects out, and every mistake of a file in one go."""

import os
import re
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    field_validator,
    model_validator,
)

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


VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([^}]*)\})")


def _variable(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if name not in os.environ:
        raise ValueError(f"the environment variable '{name}' is not set; set it, or write the path")
    return os.environ[name]


def _usable(place: str) -> str:
    if not place:
        raise ValueError("given ''; it should be a name or a path")
    expanded = os.path.expanduser(VARIABLE.sub(_variable, place))
    if expanded.startswith("~"):
        raise ValueError(f"given {short(place)}; its home folder is unknown")
    try:
        expanded.encode()
        os.stat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        pass  # a name on the hub, or a folder that is still to be made
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"given {short(place)}; it cannot be a path: {reason}") from error
    return expanded


def absolute(place: str) -> str:
    """Return an existing path as absolute; a hub name unchanged."""
    return _anchored(place) if os.path.exists(place) else place


def _anchored(place: str) -> str:
    return str(Path(place).absolute())


# As a plugin's option is written into the resolved recipe, which runs again from any folder.
Place = Annotated[str, AfterValidator(_usable), PlainSerializer(absolute, when_used="json")]
"""A path, in which ~ and ${NAME} (environment variables) are expanded; or a hub name."""
Folder = Annotated[str, AfterValidator(_usable), PlainSerializer(_anchored, when_used="json")]
"""A folder that may not exist yet, with ~ and ${NAME} as in `Place`."""
TRL = "trl"
"""In model.chat_template: trl's training variant of the model's own."""
LOSSY = (
    'model.weights = "bfloat16": trained weights and optimizer states are stored in bfloat16, '
    "which rounds away most of a step at a learning rate of 1e-5; remove it where memory allows "
    "(16 bytes a weight in place of 8)"
)
FORMATS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "conversation": ("conversation",),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "preference": ("chosen", "rejected"),
    "text": ("text",),
}
"""Formats, and the columns that each needs; the first whose columns are there is taken."""
COLUMNS = [*chain(*FORMATS.values()), "input", "system", "history", "tools", "chat_template_kwargs"]
"""All columns that are read."""
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
    """Heads of keys and values. Default: as many as `heads`."""
    mlp: int | None = Field(None, ge=8, le=1_000_000)
    """Width inside the MLP. Default: four times `hidden`."""
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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of computing, of frozen weights, and of the model that the run writes."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Type of trained weights, their gradients and AdamW's moments: 16 bytes a weight in float32,
    8 in bfloat16, where most of a step at a learning rate of 1e-5 is rounded away."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give either path (a hub name or a folder) or [model.scratch]")
        return self

    @model_validator(mode="after")
    def _computes_in_its_weights(self) -> Self:
        if self.weights == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError(
                'weights = "bfloat16" needs dtype = "bfloat16"; set it, or remove weights'
            )
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
    """A folder that `plugsft prepare` wrote; `source` may then be left out, or missing here."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names that plugsft knows -> your columns: {messages = "dialogue"}."""
    ignore: list[str] = Field(default_factory=list)
    """Columns to train without: rows are read as if they did not have them. Needed for unread
    columns that change the meaning of a row (label, weight, images, ...)."""
    max_length: int = Field(4096, ge=2, lt=2**31)
    """Longest example, in tokens."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to longer examples; the count is always reported."""
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
        if both := sorted({*self.ignore} & {*self.columns.values()}):
            raise ValueError(f"ignore and columns both name '{both[0]}'")
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
    """Examples per rank at a time: affects memory and speed, never results."""
    epochs: Count = 1
    """Times each example is seen."""
    steps: Count | None = None
    """Total steps, instead of epochs."""
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
    keep_whole_gradients: bool = False
    """FSDP2 only: reduce gradients once a step, not after every micro-batch. Less traffic between
    ranks, but each stores whole gradients until then: 4 bytes a trained weight."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random follows from it."""
    log_every: Count = 10
    """Steps between console lines; metrics.jsonl has every step."""

    @field_validator("epochs", mode="before")
    @classmethod
    def _whole_epochs(cls, epochs: Any) -> Any:
        if isinstance(epochs, float):
            raise ValueError(f"given {epochs}; it should be a whole number; or set train.steps")
        return epochs


class Checkpoint(Table):
    """Checkpoints."""

    every: int | None = Field(None, ge=0, lt=2**31)
    """Steps between checkpoints. Default: a tenth of the run, at most 500. 0 saves only at the end,
    and when the run is stopped."""
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
    device: Literal["auto", "cpu"] = "auto"
    """Where to train: on GPUs where there are any; or on the CPU even so."""
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
                "data.tokens: [model.scratch] would train another tokenizer; name the one of "
                "these tokens in model.tokenizer (`plugsft prepare` prints its folder)"
            )
        return self

    def has(self, plugin: str) -> bool:
        """Tell whether a plugin is active."""
        return plugin in self.plugins

    def evaluates(self, step: int) -> bool:
        """Tell whether it is evaluated after this step, whatever comes then."""
        return self.eval is not None and step % self.eval.every == 0

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.output)


def short(value: Any) -> str:
    """Write a value as it was given, or its beginning."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of more digits than Python writes"
    return text if len(text) <= 60 else text[:57] + "..."
