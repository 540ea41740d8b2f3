"""Every hook of plugsft, in the order of a run, and the declaration of a plugin.

A *stage* returns one result. The core answers it; one plugin may answer instead; any number may
wrap it:

    @hookimpl(wrapper=True)
    def optimize_model(self, load):
        load.kwargs["attn_implementation"] = "sdpa"   # before the core's answer
        model = yield
        return model                                  # the result for the next wrapper

A *notice* goes to every plugin; the order does not matter.
An implementation names only the arguments that it needs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, dataclass_transform

import pluggy
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from .base.machine import Machine
    from .base.types import (
        Batch,
        Build,
        CacheEntry,
        Encoded,
        Feed,
        Ints,
        Layouts,
        ModelLoad,
        Rendered,
        Row,
        Score,
        Shard,
        Slice,
        Work,
    )
    from .recipe.tables import Data, Recipe, Train
    from .tokens.store import Tokens
    from .tokens.tokenizer import Tokenizer

hookimpl = pluggy.HookimplMarker("plugsft")
notice = pluggy.HookspecMarker("plugsft")
stage = notice(firstresult=True)

PASSES = ("cache", "tokenize", "render")
"""Stages where returning None passes the call on: to other plugins, then to the core."""

DATA = ("cache", "tokenize", "render", "encode")
"""The hooks of data preparation; `plugsft prepare` calls only these."""

PLUGIN = "__plugsft__"
"""Attribute of a plugin's class that holds its contract."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """The arguments of @plugin(...)."""

    after: tuple[str, ...]
    requires: tuple[str, ...]
    conflicts: dict[str, str]
    learns: tuple[str, ...]
    tokens: tuple[str, ...] | None


T = TypeVar("T")


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def plugin(
    *,
    after: Sequence[str] = (),
    requires: Sequence[str] = (),
    conflicts: dict[str, str] | None = None,
    learns: Sequence[str] = (),
    tokens: Sequence[str] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Turn a class into a plugin: fields are options, methods marked @hookimpl are hooks.

    `after`: plugins that this one wraps. `requires`: plugins that must be active too. `conflicts`:
    plugins that must not be active -> reason. `learns`: options that affect results, unless at
    their defaults; resuming with other values is refused. `tokens`: options that affect tokens;
    default: all options of a plugin with hooks of data. Declare state with `state(default)`.
    """
    contract = Contract(
        tuple(after),
        tuple(requires),
        dict(conflicts or {}),
        tuple(learns),
        None if tokens is None else tuple(tokens),
    )
    config = ConfigDict(
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        # pydantic checks the types of state too; these may be any class.
        arbitrary_types_allowed=True,
    )

    def declare(cls: type[T]) -> type[T]:
        plugin_class: Any = pydantic_dataclass(kw_only=True, config=config)(cls)
        setattr(plugin_class, PLUGIN, contract)
        return cast("type[T]", plugin_class)

    return declare


def state(default: Any = None) -> Any:
    """Declare an attribute of a plugin that is not an option; each run gets its own copy."""
    return dataclasses.field(
        init=False, default_factory=lambda: copy.deepcopy(default), repr=False, compare=False
    )


class Prelude(Protocol):
    """The model, the ranks and the cache before step 1, for `annotate`."""

    rank: int
    ranks: int
    exact: bool
    """Whether the model computes in float32 everywhere."""

    @property
    def load(self) -> ModelLoad:
        """How the model was loaded."""

    def losses(self, model: Module, tokens: Tokens, examples: Ints) -> Tensor:
        """Return -log p of the targets of examples, computed as one micro-batch of the run.

        Under ZeRO-3 and FSDP2 all ranks must call it together, even without examples.
        """

    def added(self, values: Tensor) -> Tensor:
        """All-reduce values: return their sums over all ranks."""

    def agreed(self, operation: str) -> AbstractContextManager[None]:
        """Run a block on all ranks; if it fails on one, all ranks raise.

        For code without collectives that may fail on a single rank, such as writing a file.
        """

    def frozen(self, path: str = "", revision: str | None = None) -> Module:
        """Load a model for inference: the run's own base again, or the one at `path`."""

    def keep(
        self, key: dict[str, Any], build: Callable[[Path | None], None], read: Callable[..., Any]
    ) -> Any:
        """Return `read(entry)` of a key's cache entry; build the entry if it is missing.

        All ranks build together: the main process gets the folder, the others None.
        """


class Hooks(Protocol):
    """The hook specifications, and the type of the object that calls them."""

    @notice
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Check the recipe before anything is loaded; raise RecipeError to refuse it."""

    @stage
    def cache(
        self, key: dict[str, Any], build: Callable[[Path], None], read: Callable[..., CacheEntry]
    ) -> CacheEntry:
        """Return `read(folder, in_memory)` of a key's cache entry; its result is usually tokens.

        If the entry is missing, `build(folder)` fills a new one first.
        """

    @stage
    def tokenize(self, slices: list[Slice], work: Work) -> list[Shard]:
        """Call `work` on every slice, in any process; return the shards in the order of slices."""

    @stage
    def render(self, rows: list[Row], tokenizer: Tokenizer, data: Data) -> Rendered | None:
        """Turn rows into texts with trained spans; return None for rows of another format."""

    @stage
    def encode(self, texts: list[str], tokenizer: Tokenizer, special_tokens: bool) -> Encoded:
        """Turn texts into token ids, with the byte offset where each token ends."""

    @stage
    def optimize_model(self, load: ModelLoad) -> Module:
        """Load the model. Edit `load` before the yield, the model after it."""

    @stage
    def optimizer(self, model: Module, train: Train) -> Optimizer:
        """Create the optimizer."""

    @stage
    def annotate(self, model: Module, tokens: Tokens, prelude: Prelude) -> Tokens:
        """Add columns that need the model, before step 1; return the tokens."""

    @stage
    def batches(self, order: Ints, lengths: Ints, ranks: int, train: Train) -> Layouts:
        """Lay out an epoch's examples as global batches: [step][rank][micro-batch] -> examples.

        `order` is the epoch's shuffled order, `lengths` the tokens of each example. Every rank
        gets the same number of micro-batches; some may be empty arrays.
        """

    @stage
    def feed(self, build: Build, steps: range) -> Feed:
        """Iterate over `build(step)` in order. `build` is pure and may be called ahead of time."""

    @stage
    def collate(self, tokens: Tokens, examples: Ints, pad: int) -> Batch:
        """Turn examples into tensors; no examples give a batch without targets."""

    @stage
    def step(self, model: Module, batch: Batch, total: int, score: Score) -> Tensor:
        """Return a micro-batch's loss: the sum over its targets, divided by `total`.

        `score` calls the next stage.
        """

    @stage
    def score(self, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Return -log p of each target in float32, in order; or their sum, if `summed`."""

    @notice
    def measure(self) -> dict[str, Tensor]:
        """Return sums over this rank's micro-batches since the last call; same names on all ranks.

        The core sums them over ranks, divides by the step's `total`, and logs them; metrics of
        an evaluation as `eval_NAME`. Names of other metrics are refused.
        """

    @notice
    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Receive a step's metrics, on the main process."""

    @notice
    def record(self, run: dict[str, Any]) -> None:
        """Receive run.json's content, on the main process, before the first step and at the end.

        The verdicts of the end are added after this hook.

        `run["status"]` is "running" before the first step. `run["steps"]["done"]` is the last
        finished step, which is not 0 at the start of a resumed run.
        """

    @notice
    def verdict(self) -> str | None:
        """Return a line about what the plugin did; called once the model is loaded, and at the end.

        `plugsft prepare` calls it without a model, for plugins with hooks of data.
        """
