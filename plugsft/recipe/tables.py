"""The recipe as typed tables: options, their docs, and their defaults."""

import math
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
    PrivateAttr,
    field_validator,
    model_validator,
)

from ..base.errors import reason_of
from .capabilities import Capability, ensure_known

HUB = "hub:"
"""The beginning of `--to` for a repository on the hub."""
_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?|[\w-]+")
"""A name on the hub; of a data set with subsets, "owner/name:subset"."""
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([^}]*)\})")
DATA_FILES = (".jsonl", ".json", ".parquet", ".arrow", ".csv")
"""The endings of files with rows."""
TEMPLATES = ("auto", "own")
"""Values of model.chat_template that are no files."""
LOSSY = (
    'model.weights = "bfloat16": trained weights and optimizer states are stored in bfloat16, '
    "which rounds away most of a step at a learning rate of 1e-5; add "
    f'{Capability.bundled("bfloat16_updates").table} with kind = "corrected", which keeps them'
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
"""Format -> its required columns; the first format that matches a row is used."""
COLUMNS = [
    *chain(*FORMATS.values()),
    *("input", "system", "history", "tools", "chat_template_kwargs", "label", "weight"),
    "input_ids",
    "labels",
]
"""All columns that are read from rows."""


def _variable(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if name not in os.environ:
        raise ValueError(f"the environment variable '{name}' is not set; set it, or write the path")
    return os.environ[name]


def _expand(place: str) -> str:
    """Expand ~ and variables in a path; raise ValueError if it cannot be a path."""
    if not place:
        raise ValueError("given ''; it should be a name or a path")
    expanded = os.path.expanduser(VARIABLE.sub(_variable, place))
    if "://" in expanded:  # not shown: it may hold a password
        raise ValueError(
            "an address, and a run reads files: `plugsft fetch ADDRESS` copies rows into data/"
        )
    given = f"given {short(place)};"
    if expanded.startswith("~"):
        raise ValueError(f"{given} its home folder is unknown")
    try:
        expanded.encode()
        os.stat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        pass  # a hub name, or a folder that does not exist yet
    except (OSError, ValueError) as error:
        raise ValueError(f"{given} it cannot be a path: {reason_of(error)}") from error
    return expanded


def absolute(place: str) -> str:
    """Return an existing path as absolute; a hub name unchanged."""
    return _anchored(place) if os.path.exists(place) else place


def _anchored(place: str) -> str:
    return str(Path(place).absolute())


# Absolute in the resolved recipe, so that it runs from any folder; plugins use these types too.
Place = Annotated[
    str,
    AfterValidator(_expand),
    PlainSerializer(absolute, when_used="json"),
]
"""A hub name, or a path with ~ and ${NAME} (environment variables) expanded."""
Template = Annotated[
    str,
    AfterValidator(_expand),
    PlainSerializer(lambda name: name if name in TEMPLATES else absolute(name), when_used="json"),
]
"""A place, or one of `TEMPLATES`, even if a file has that name."""
Folder = Annotated[str, AfterValidator(_expand), PlainSerializer(_anchored, when_used="json")]
"""A folder that may not exist yet, with ~ and ${NAME} as in `Place`."""
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Table(BaseModel):
    """One table of a recipe."""

    # defer_build: validators are built on first use, so that `import plugsft` stays fast.
    model_config = ConfigDict(
        extra="forbid",
        ser_json_inf_nan="constants",  # TOML has nan and inf
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
    """Heads of keys and values. Default: `heads`."""
    mlp: int | None = Field(None, ge=8, le=1_000_000)
    """Hidden width of the MLP. Default: four times `hidden`."""
    vocab: int = Field(2048, ge=300, le=1_000_000)
    """Most entries of the new byte-level BPE tokenizer."""
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

    path: Place | None = Field(None, examples=["Qwen/Qwen3-0.6B"])
    """The model to train: a hub name or a folder. Required, unless [model.scratch] makes one."""
    scratch: Scratch | None = None
    """A new small model, instead of `path`; its keys are those of [model.scratch]."""
    revision: str | None = None
    """Branch, tag or commit of `path`, if that is a hub name. Default: main."""
    tokenizer: Place | None = None
    """Another tokenizer: a hub name or a folder. Default: the model's own."""
    chat_template: Template = "auto"
    """The template that writes the rows. "auto" or "own": the model's. Or a Jinja file, which also
    becomes the model's; its `{% generation %}` blocks, if it has any, say what is trained. So does
    NAME.response.json beside NAME.jinja, by which transformers reads answers back."""
    add_tokens: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Tokens to add to the tokenizer: `["<think>", "</think>"]`. If the model's embeddings have too
    few rows, they get more, each the mean of the others. Adapters train none of these rows, unless
    plugins.lora.train_new_tokens is set."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of computation, of frozen weights, and of the saved model. On a GPU take "bfloat16";
    "float16" is for GPUs without it (T4, V100), and scales the loss."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Type of trained weights, their gradients and AdamW's moments: 16 bytes a weight in float32,
    8 in bfloat16, which rounds away most of a step at a learning rate of 1e-5, but for
    [plugins.low_memory_adam]."""
    text_only: bool = False
    """For a model that sees: train and save transformers' class for text in place of the published
    one, without its eyes and under other names."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for authors whom you trust."""

    @property
    def template_file(self) -> str | None:
        """The Jinja file that replaces the tokenizer's chat template."""
        return None if self.chat_template in TEMPLATES else self.chat_template

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.path is None and self.scratch is None:
            raise ValueError(
                'set path to a hub name or a folder, for instance path = "Qwen/Qwen3-0.6B"; or add '
                "[model.scratch] for a small new model"
            )
        if self.path is not None and self.scratch is not None:
            raise ValueError("path and [model.scratch] are both set; remove one")
        if self.revision and os.path.isdir(str(self.path)):
            raise ValueError(f"revision is for the hub, and {self.path} is a folder; remove it")
        if self.weights == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError(
                'weights = "bfloat16" needs dtype = "bfloat16"; set it, or remove weights'
            )
        return self

    @field_validator("add_tokens")
    @classmethod
    def _tokens_differ(cls, tokens: list[str]) -> list[str]:
        if twice := sorted({token for token in tokens if tokens.count(token) > 1}):
            raise ValueError(f"{short(twice[0])} is named twice; remove one")
        return tokens


class Source(Table):
    """One source of a mixture."""

    source: Place = Field(examples=["chats.jsonl"])
    """A hub name (with a subset: "owner/name:subset"), a folder, or a jsonl, json, csv, parquet or
    arrow file."""
    split: str = "train"
    """Split of a hub name or folder; slices as in datasets: "train[:1000]", "train[-5%:]"."""
    weight: float = Field(1.0, gt=0, le=1_000)
    """How often an epoch uses each row: 0.5 a new random half, 2 all rows twice."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of this source's columns, beside those of `[data.columns]`."""
    train_on: Literal["assistant", "last", "all"] | None = None
    """What to train on in this source, in place of data.train_on."""


class Data(Table):
    """The data to train on."""

    source: Place | None = Field(None, examples=["chats.jsonl"])
    """A hub name (with a subset: "owner/name:subset"), a folder, or a jsonl, json, csv, parquet or
    arrow file."""
    split: str = "train"
    """Split of a hub name or folder; slices as in datasets: "train[:1000]", "train[-5%:]"."""
    sources: list[Source] | None = Field(None, min_length=1)
    """A mixture of sources, instead of `source`: a [[data.sources]] table for each."""
    tokens: Place | None = None
    """A folder that `plugsft prepare` printed: its tokens are trained, and nothing is tokenized.
    `source` may then be absent from the recipe or the disk."""
    columns: dict[str, str] = Field(default_factory=dict)
    """plugsft's column names -> yours: `{messages = "dialogue"}`."""
    ignore: list[str] = Field(default_factory=list)
    """Columns to ignore. Required for unread columns that change the meaning of a row (label,
    images, ...)."""
    system: str = ""
    """The system prompt of chats that have none."""
    max_length: int = Field(4096, ge=2, lt=2**31)
    """Longest example, in tokens; at most the model's context."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What to do with longer examples: keep their beginning, leave them out, or stop. Their count
    is always reported."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What to train on: all assistant turns, the last one, or every token."""
    on_bad_row: Literal["error", "drop"] = "error"
    """Whether an unusable row stops the run, or is dropped and counted."""
    template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables for the chat template: `{enable_thinking = true}`."""

    _lead_row: dict[str, Any] = {}
    """Of the first rows of one source: all its rows are read as it is."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.source and self.sources:
            raise ValueError("source and [[data.sources]] are both set; remove one")
        if not (self.source or self.sources or self.tokens):
            raise ValueError(
                'set source to a file, a folder or a hub name, for instance source = "chats.jsonl"'
            )
        if self.sources and self.split != "train":
            raise ValueError("split belongs into each of [[data.sources]]")
        for source in (self, *(self.sources or ())):
            if both := sorted({*self.ignore} & {*source.columns.values()}):
                raise ValueError(f"ignore and columns both name '{both[0]}'")
        return self

    def of(self, source: Source) -> "Data":
        """Return what holds for the rows of a source."""
        columns, train_on = self.columns | source.columns, source.train_on or self.train_on
        return self.model_copy(update={"columns": columns, "train_on": train_on})

    def all_sources(self) -> list[Source]:
        """Return the sources; most recipes have one."""
        if self.source:
            return [Source(source=self.source, split=self.split)]
        return self.sources or []


class Eval(Table):
    """Evaluation while training."""

    every: Count | Literal["epoch"] = 100
    """Steps between evaluations, or "epoch": one after each. The run always ends with one. Each
    computes all rows of its source."""
    at_start: bool = False
    """Whether to evaluate before step 1 too, which shows what the training changes."""
    source: Place | None = None
    """A hub name, a folder or a file, as data.source, which is the default. Columns have the names
    of [data.columns], and of the source in [[data.sources]] with this file."""
    split: str = "train"
    """Split or slice of the source: "train[95%:]". Its rows must not be trained."""

    def interval(self, per_epoch: int) -> int:
        """Return the steps between evaluations."""
        return per_epoch if self.every == "epoch" else self.every


class Train(Table):
    """How to train."""

    batch_size: Count = Field(examples=[16])
    """Examples per optimizer step (the global batch), over all ranks."""
    learning_rate: float = Field(ge=0, allow_inf_nan=False, examples=[1e-5])
    """Peak learning rate. Bundled recipes take about 1e-5 for all weights, and 1e-4 for
    adapters."""
    micro_batch: Count = 1
    """Examples per micro-batch of a rank; affects memory and speed, results only by rounding. With
    [plugins.bfd_packing] its `capacity` takes the place of this key."""
    epochs: Count = 1
    """Passes over the data."""
    steps: Count | None = None
    """Total steps, instead of `epochs`."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    """The learning rate after the warm-up: it stays at its peak, or falls on a line or half a
    cosine. With "wsd", it stays until `decay`, and then falls on a line. [plugins.hf_schedule] has
    the others of transformers."""
    warmup: float = Field(0.0, ge=0, lt=2**31)
    """Warm-up: below 1 a share of all steps, rounded up, else a number of steps. Step 1 then has
    the learning rate 0, as in transformers; with "wsd" `final_rate`."""
    decay: float | None = Field(None, gt=0, lt=2**31)
    """For "wsd": the last part of the run, in which the learning rate falls. Below 1 a share of all
    steps, rounded up, else a number of steps."""
    final_rate: float | None = Field(None, ge=0, le=1)
    """The learning rate at the end of "linear", "cosine" and "wsd", as a share of its peak.
    Default: 0."""
    weight_decay: float = Field(0.0, ge=0, le=1_000)
    """Decoupled weight decay; not applied to norms and biases."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay rate of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's decay rate of the second moment."""
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Clip gradients to this norm; 0 disables clipping."""
    keep_whole_gradients: bool = False
    """FSDP2 only: reduce gradients once a step, not after each micro-batch. Less traffic, but each
    rank stores whole gradients: 4 bytes a trained weight."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything random."""
    log_every: Count = 10
    """Steps between console lines; metrics.jsonl has all steps."""

    @staticmethod
    def steps_of(part: float, total: int) -> int:
        """Count the steps of a part of the run as transformers does: a share is rounded up."""
        return math.ceil(part * total) if part < 1 else int(part)

    def replaced_epochs(self) -> str:
        """Return "; train.steps = 50 replaces train.epochs = 3" if the recipe sets both."""
        text = f"; train.steps = {self.steps} replaces train.epochs = {self.epochs}"
        return text if self.steps and "epochs" in self.model_fields_set else ""

    @field_validator("warmup", "decay")
    @classmethod
    def _whole_steps(cls, part: float | None) -> float | None:
        if part and part > 1 and part % 1:
            raise ValueError(
                f"given {part}; from 1 on it is a number of steps, and should be whole"
            )
        return part

    @model_validator(mode="after")
    def _schedule_keys_agree(self) -> Self:
        if (self.schedule == "wsd") != (self.decay is not None):
            raise ValueError(
                'schedule = "wsd" and decay, the last part of the run, go together: set both, for '
                "instance decay = 0.1, or neither"
            )
        if self.schedule == "constant" and self.final_rate is not None:
            raise ValueError(
                'final_rate is not for schedule = "constant", which stays at its peak; remove it'
            )
        return self

    @field_validator("epochs", mode="before")
    @classmethod
    def _whole_epochs(cls, epochs: Any) -> Any:
        if isinstance(epochs, float):
            raise ValueError(f"given {epochs}; it should be a whole number; or set train.steps")
        return epochs


class Checkpoint(Table):
    """When checkpoints are written, and which of them are kept."""

    every: Annotated[int, Field(ge=0, lt=2**31)] | Literal["epoch"] | None = None
    """Steps between checkpoints, or "epoch": one after each. Default: a tenth of the run, at most
    500. 0 saves only at the end and when the run is stopped."""
    keep: Count = 3
    """Number of latest checkpoints to keep. Each holds weights and optimizer states; `plugsft plan`
    prints its size."""
    keep_best: str | None = Field(None, examples=["eval_loss"])
    """Metric of evaluations, such as "eval_loss". The checkpoint with the best value, the earliest
    of equal ones, is kept as well, and becomes the final model."""
    best: Literal["lowest", "highest"] = "lowest"
    """Which value of `keep_best` is the best; to be set for what is no loss."""

    @model_validator(mode="after")
    def _keeps_the_lowest_loss(self) -> Self:
        if self.best == "highest" and (self.keep_best or "").endswith("loss"):
            raise ValueError(
                f'best = "highest" would keep the worst model: {self.keep_best} is a loss; remove '
                "best"
            )
        return self

    def interval(self, steps: int, per_epoch: int) -> int:
        """Return the steps between checkpoints; 0 means only at the end."""
        if self.every is None:
            return min(500, -(-steps // 10))
        return per_epoch if self.every == "epoch" else self.every

    def describe(self, steps: int, per_epoch: int) -> str:
        """Describe in words when checkpoints are written."""
        every = self.interval(steps, per_epoch)
        text = f"every {every:,} steps, the last {self.keep} kept" if every else "at the end only"
        best = f", and the one with the {self.best} {self.keep_best}" if self.keep_best else ""
        return text.replace("every 1 steps", "every step") + best


class Recipe(Table):
    """A whole run."""

    output: Folder = Field(examples=["runs/first"])
    """Folder for everything that the run writes."""
    device: Literal["auto", "cpu"] = "auto"
    """Where to train: auto uses GPUs if there are any, cpu never does."""
    model: Model
    data: Data
    train: Train
    eval: Eval | None = None
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    plugins: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Active plugins by name, with their options."""
    _provided: list[tuple[str, str, str | None]] = PrivateAttr(default_factory=list)
    """Capabilities: name, the plugin that provides it, and the option that tunes it."""

    @model_validator(mode="after")
    def _evaluates_on_rows_of_its_own(self) -> Self:
        trained = [(source.source, source.split) for source in self.data.all_sources()]
        if self.eval and (
            (source := self.eval.source or self.data.source) is None
            or (source, self.eval.split) in trained
        ):
            raise ValueError(
                'eval.source: no rows of its own; set source = "eval.jsonl", or hold rows out: '
                'split = "train[95%:]" here, and split = "train[:95%]" in [data]'
            )
        if self.data.tokens and self.model.scratch and not self.model.tokenizer:
            raise ValueError(
                "data.tokens: [model.scratch] would train another tokenizer; name the one of "
                "these tokens in model.tokenizer (`plugsft prepare` prints its folder)"
            )
        return self

    def eval_source(self) -> Source:
        """Return the source of the evaluation data; rows of a source are read as that one's."""
        assert self.eval is not None
        name = self.eval.source or str(self.data.source)
        read_as = {source.source: source for source in self.data.sources or ()}
        source = read_as.get(name, Source(source=name))
        return source.model_copy(update={"split": self.eval.split, "weight": 1.0})

    def packed_capacity(self) -> int:
        """Return the most tokens of a packed micro-batch."""
        packing = self.provides("packed_rows")
        sequences = 2 if self.provides("preference_pairs") else 1
        return int((packing and packing.value) or sequences * self.data.max_length)

    def micro_batch_size(self) -> tuple[str, int]:
        """The key that limits a micro-batch, and its value: examples, or tokens of packed rows."""
        packing = self.provides("packed_rows")
        if packing is None:
            return "train.micro_batch", self.train.micro_batch
        return packing.key, self.packed_capacity()

    def provides(self, capability: str) -> Capability | None:
        """Return the capability if an active plugin provides it."""
        return next(iter(self.providers(capability)), None)

    def providers(self, capability: str) -> list[Capability]:
        """Return a capability that several plugins may provide, once for each of them."""
        ensure_known(capability)
        provided = [
            Capability(plugin, option, self.plugins[plugin].get(option or ""))
            for name, plugin, option in self._provided
            if name == capability and plugin in self.plugins
        ]
        # An option that is true or false turns the capability on or off.
        return [each for each in provided if each.value is not False]

    @property
    def loses_small_steps(self) -> bool:
        """Whether rounding to bfloat16 loses most of a step."""
        return self.model.weights == "bfloat16" and self.provides("bfloat16_updates") is None

    def with_provided(self, provided: list[tuple[str, str, str | None]]) -> Self:
        """Return a copy that knows which plugins provide which capabilities."""
        copy = self.model_copy()
        copy._provided = provided
        return copy

    def evaluates(self, step: int, steps: int, per_epoch: int) -> bool:
        """Tell whether an evaluation follows this step of a run; step 0 is its start."""
        if self.eval is None:
            return False
        if step == 0:
            return self.eval.at_start
        return step == steps or step % self.eval.interval(per_epoch) == 0

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.output)


def short(value: Any) -> str:
    """Return a value as a recipe spells it, cut to 60 characters."""
    try:
        text = repr(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:
        return "a number of more digits than Python writes"
    return text if len(text) <= 60 else text[:57] + "..."


def is_hub_name(name: str) -> bool:
    """Tell whether a name belongs to the hub, and is no path here."""
    return bool(_NAME.fullmatch(name)) and not Path(name).exists()
