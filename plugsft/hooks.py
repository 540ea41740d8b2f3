"""Every hook of plugsft, in the order in which a run calls them, and how a plugin is declared.

A *stage* turns one thing into the next. The core answers it; at most one plugin may answer in its
place; any number may wrap:

    @hookimpl(wrapper=True)
    def optimize_model(self, load):
        load.kwargs["attn_implementation"] = "sdpa"   # before the core's answer
        model = yield
        return model                                  # what the next wrapper gets

A *notice* is heard by every plugin, and its order never matters.
An implementation takes any part of a hook's arguments, by their names.
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
        Encoded,
        Feed,
        Ints,
        Kept,
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
"""Stages whose answer may be None: it passes the question on, to the core at last."""

DATA = ("cache", "tokenize", "render", "encode")
"""The hooks of data: with them alone, rows become tokens on a machine that never trains."""

PLUGIN = "__plugsft__"
"""Where a plugin's class keeps its contract."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """A plugin's demands on other plugins."""

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
    """Make a class a plugin: its fields are its options, its marked methods its hooks.

    `after` names plugins that this one wraps where both are active; `requires`, plugins that must
    be active too; `conflicts`, plugins that must not, each with the reason; `learns`, options that
    change what is learned, other than by default: no run goes on with others of them; `tokens`,
    those of its options that decide about tokens, where it has hooks of the data and not all do.
    State that is no option is declared with `state(default)`.
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
        # State may be anything; pydantic looks at its type as well.
        arbitrary_types_allowed=True,
    )

    def declare(cls: type[T]) -> type[T]:
        made: Any = pydantic_dataclass(kw_only=True, config=config)(cls)
        setattr(made, PLUGIN, contract)
        return cast("type[T]", made)

    return declare


def state(default: Any = None) -> Any:
    """Declare an attribute of a plugin that is no option of it; each run gets its own copy."""
    return dataclasses.field(
        init=False, default_factory=lambda: copy.deepcopy(default), repr=False, compare=False
    )


class Prelude(Protocol):
    """What a plugin may do with the whole run before step 1, in `annotate`."""

    rank: int
    ranks: int
    exact: bool
    """Whether the model computes in float32 everywhere."""

    @property
    def load(self) -> ModelLoad:
        """How the model was loaded."""

    def losses(self, model: Module, tokens: Tokens, examples: Ints) -> Tensor:
        """Return -log p of the targets of some examples, in one micro-batch as the run makes it.

        Under ZeRO-3 and FSDP2 all ranks must call it together, if need be without examples.
        """

    def added(self, values: Tensor) -> Tensor:
        """Return the sums over all ranks."""

    def agreed(self, operation: str) -> AbstractContextManager[None]:
        """Run a body without collectives on all ranks; if one fails, all raise.

        For code between two collectives that may fail on a single rank, such as writing.
        """

    def frozen(self, path: str = "", revision: str | None = None) -> Module:
        """Load a model as the run's was, that one again or another; it is never trained."""

    def keep(
        self, key: dict[str, Any], build: Callable[[Path | None], None], read: Callable[..., Any]
    ) -> Any:
        """Return `read` of the cache entry of a key; build the entry if it is missing.

        All ranks build together: the main process with the folder, the others with None.
        """


class Hooks(Protocol):
    """The specs. The registry hands this class out as the type of its caller."""

    @notice
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Look at the whole recipe before anything is loaded; raise RecipeError to refuse it."""

    @stage
    def cache(
        self, key: dict[str, Any], build: Callable[[Path], None], read: Callable[..., Kept]
    ) -> Kept:
        """Return what `read(folder, in_memory)` makes of the folder of a key, as a rule its tokens.

        Where there is none, `build` fills a new one.
        """

    @stage
    def tokenize(self, slices: list[Slice], work: Work) -> list[Shard]:
        """Call `work` on every slice of the sources, anywhere; return the shards in order."""

    @stage
    def render(self, rows: list[Row], tokenizer: Tokenizer, data: Data) -> Rendered | None:
        """Turn rows into text with trained spans. Returning None means: not my format."""

    @stage
    def encode(self, texts: list[str], tokenizer: Tokenizer, special_tokens: bool) -> Encoded:
        """Turn texts into token ids, with the place in their bytes where each token ends."""

    @stage
    def optimize_model(self, load: ModelLoad) -> Module:
        """Load the model. Edit `load` before the yield, the model after it."""

    @stage
    def optimizer(self, model: Module, train: Train) -> Optimizer:
        """Make the optimizer."""

    @stage
    def annotate(self, model: Module, tokens: Tokens, prelude: Prelude) -> Tokens:
        """Add columns that need the model, before step 1; return the tokens."""

    @stage
    def batches(self, order: Ints, lengths: Ints, ranks: int, train: Train) -> Layouts:
        """Lay an epoch's examples out as windows: [window][rank][micro-step] -> examples.

        `order` is the epoch's shuffled order, `lengths` the tokens of every example. Every rank
        gets the same number of micro-steps; one without examples is an empty array.
        """

    @stage
    def feed(self, build: Build, steps: range) -> Feed:
        """Iterate over `build(step)`, in order. `build` is pure: it may be called ahead."""

    @stage
    def collate(self, tokens: Tokens, examples: Ints, pad: int) -> Batch:
        """Turn examples into tensors; none of them gives a batch that trains nothing."""

    @stage
    def step(self, model: Module, batch: Batch, total: int, score: Score) -> Tensor:
        """Return the micro-batch's loss, summed over its targets and divided by `total`.

        `score` calls the next stage.
        """

    @stage
    def score(self, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Return -log p of the batch's targets, in float32: each, in their order, or their sum."""

    @notice
    def measure(self) -> dict[str, Tensor]:
        """Return sums over the micro-batches since last asked, on every rank the same names.

        The core reduces them over ranks, divides by the window's total, and logs them; those of
        evaluation as `eval_NAME`. Names of the core's or another plugin's metrics are refused.
        """

    @notice
    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Hear the metrics of a step, on the main process."""

    @notice
    def record(self, run: dict[str, Any]) -> None:
        """Hear what run.json holds, on the main process: before the first step, and at the end.

        `run["status"]` tells them apart: at first it is "running". `run["steps"]["done"]` is the
        last step made, not 0 at first where a run goes on.
        """

    @notice
    def verdict(self) -> str | None:
        """Say in one line what the plugin did; asked once the model is there, and at the end.

        `plugsft prepare` asks those that have hooks of the data, where no model ever is.
        """
