"""Every hook of plugsft, in the order of a run, and the declaration of a plugin.

A *stage* returns one result. The core implements it; one plugin may implement it instead; any
number may wrap it:

    @hookimpl(wrapper=True)
    def optimize_model(self, load):
        load.kwargs["attn_implementation"] = "sdpa"   # before the core loads it
        model = yield
        return model                                  # the result for the next wrapper

A *notice* calls each plugin in turn, in the declared order, on every rank. A plugin that fails ends
the run in good order; the plugins after it are still called.
An implementation names only the arguments that it needs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, dataclass_transform

import pluggy
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from .base.machine import Machine
    from .base.types import (
        Batch,
        Build,
        Encoded,
        Ints,
        Layouts,
        LoadedSteps,
        Rendered,
        Row,
        Shard,
        Slice,
        TokenNll,
    )
    from .data.slices import ShardWriter as ShardWriter
    from .model.load import ModelLoad as ModelLoad
    from .ranks.agree import Ranks as Ranks
    from .ranks.trained_model import RunModel as RunModel
    from .recipe.tables import Data, Recipe, Train
    from .run import Run as Run
    from .tokens.store import Tokens
    from .tokens.tokenizer import Tokenizer
else:
    # Plugins name these classes in annotations only; importing them takes seconds.
    ModelLoad = Ranks = Run = RunModel = ShardWriter = Any

hookimpl = pluggy.HookimplMarker("plugsft")
_specification = pluggy.HookspecMarker("plugsft")
notice, stage = _specification, _specification(firstresult=True)

Purpose = Literal["evaluate", "generate", "save"]
Kind = Literal["checkpoint", "model"]
Status = Literal["completed", "stopped", "failed"]

PASSES = ("cache", "tokenize", "render")
"""Stages where None leaves the call to the other plugins, then to the core."""

DATA = ("cache", "tokenize", "render", "encode")
"""The hooks of data preparation; `plugsft prepare` calls only these."""

EVERY = "*"
"""In @plugin(after=...): every plugin that does not say so too."""

CORE = "core"
"""Name under which the core's answers are registered."""

PLUGIN = "__plugsft__"
"""Attribute of a plugin's class that holds its contract."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """The arguments of @plugin(...)."""

    after: Sequence[str]
    before: Sequence[str]
    requires: Sequence[str]
    conflicts: dict[str, str]
    needs: dict[str, str]
    provides: dict[str, str | None]
    affects_results: Sequence[str]
    affects_tokens: Sequence[str] | None
    metrics: Sequence[str] | Callable[[Any, Recipe], Sequence[str]]
    watches: Sequence[str]


T = TypeVar("T")


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def plugin(
    *,
    after: Sequence[str] = (),
    before: Sequence[str] = (),
    requires: Sequence[str] = (),
    conflicts: dict[str, str] | None = None,
    needs: dict[str, str] | None = None,
    provides: dict[str, str | None] | None = None,
    affects_results: Sequence[str] = (),
    affects_tokens: Sequence[str] | None = None,
    metrics: Sequence[str] | Callable[[Any, Recipe], Sequence[str]] = (),
    watches: Sequence[str] = (),
) -> Callable[[type[T]], type[T]]:
    """Turn a class into a plugin: fields are options, methods marked @hookimpl are hooks.

    `after`: plugins that come before this one in notices, and inside it in stages, which it wraps;
    `before`: those that come after it; after=["*"]: after all others.
    `requires`: plugins that must be active too. `conflicts`: plugins that must not be active ->
    reason. `needs`: package -> the extra of plugsft that installs it. `provides`: capability -> the
    option that tunes it, or None. `affects_results`: options that affect results; a resume with
    another value of these is refused, and with "enabled" among them one without the plugin, or with
    it only now. `affects_tokens`: options that affect tokens; default: all options of a plugin with
    `render` or `encode`. `metrics`: the names that `add_metrics` gives, or a function of the plugin
    and the recipe that returns them. `watches`: options that name a metric, of steps or eval_...; a
    name that the run will not have is refused. Declare state with `state(default)`.
    """
    contract = Contract(
        after,
        before,
        requires,
        conflicts or {},
        needs or {},
        provides or {},
        affects_results,
        affects_tokens,
        metrics,
        watches,
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
        return plugin_class  # type: ignore[no-any-return]

    return declare


def state(default: Any = None) -> Any:
    """Declare an attribute of a plugin that is not an option; each run gets its own copy.

    Checkpoints do not keep it: `state_dict` says what they keep.
    """
    return dataclasses.field(
        init=False, default_factory=lambda: copy.deepcopy(default), repr=False, compare=False
    )


def is_core(name: str) -> bool:
    """Whether a name is one of the core's registrations: "core", "core1" and so on."""
    return name.rstrip("0123456789") == CORE


def with_plugins(caller: Any) -> str:
    """Name a hook and the plugins that answer or wrap it: "'render' of plugin 'pairs'"."""
    names = [impl.plugin_name for impl in caller.get_hookimpls()]
    plugins = [f"plugin '{name}'" for name in names if not is_core(name)]
    return f"'{caller.name}'" + (f" of {' and '.join(plugins)}" if plugins else "")


class Hooks(Protocol):
    """The hook specifications, and the type of the object that calls them."""

    @notice
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Refuse a recipe: raise RecipeError. Called once, before anything is read."""

    @stage
    def cache(
        self, key: dict[str, Any], build: Callable[..., bool], read: Callable[..., Any]
    ) -> Any:
        """Return `read(folder, in_memory)` of the folder that a plugin chooses for a key.

        Called once per data set, and for each artefact of a plugin. The key has everything that
        the prepared data depends on; `digest(key)` is a short name for it. Call `build(folder)`
        first: if the folder is missing, one of all processes builds it and the others wait, or each
        builds a part; True where this one did. `build(folder, is_complete)` also builds a folder
        again for which `is_complete(folder)` is false. `in_memory` reads files whole, for file
        systems where mapping is slow. Return None to leave the call to another plugin, or to the
        core, which stores the data in the run's output.
        """

    @stage
    def tokenize(self, slices: list[Slice], work: ShardWriter) -> list[Shard]:
        """Return the shards of slices, in order: `work.tokenize(slice)` makes one.

        Called once per data set that is not prepared yet, and again for slices that another process
        left. In another process, call `work.attempt(slice)`, and `get()` on what comes back. Return
        None to leave the call to others.
        """

    @stage
    def render(self, rows: list[Row], tokenizer: Tokenizer, data: Data) -> Rendered | None:
        """Turn rows into texts with trained spans, and columns of numbers or booleans.

        Called for each batch of rows, perhaps in a worker; a row may come again. Return None for
        rows of another format.
        """

    @stage
    def encode(self, texts: list[str], tokenizer: Tokenizer, special_tokens: bool) -> Encoded:
        """Turn texts into token ids, with the byte offset where each token ends.

        Called after `render`, in the same process.
        """

    @stage
    def optimize_model(self, load: ModelLoad) -> Module:
        """Load the model. A wrapper edits `load` before its yield, and the model after it.

        Called once, when the data is ready. `load.kwargs["dtype"]` is the type of the loaded
        weights: float32 even where the run computes in bfloat16, but bfloat16 there under ZeRO-3,
        which adds a float32 copy.
        """

    @stage
    def optimizer(self, model: Module, train: Train) -> Optimizer:
        """Create the optimizer of all trained weights, once, after the model.

        One that leaves some out is refused, and one that ignores a setting of the recipe.
        """

    @stage
    def schedule(self, train: Train, steps: int) -> Callable[[int], float]:
        """Return the learning rate of each step, counted from 0, as a share of its peak.

        Called once, when the steps are planned. The result is a pure function of the step: all
        shares are computed before step 1, in a resumed run too. The logged rate is the one that was
        applied.
        """

    @stage
    def add_columns(self, model: RunModel, tokens: Tokens, ranks: Ranks) -> Tokens:
        """Add columns that need the model; return the tokens.

        Called once per data set, before step 1. `RunModel.score` computes losses; the kit's
        `artefact` caches results.
        """

    @stage
    def order_examples(self, tokens: Tokens, epoch: int, seed: int) -> Ints:
        """Return the indices of an epoch's examples, in order: a curriculum, a mixture.

        Called once per epoch of training; the first is 0. A pure function of its arguments, so that
        runs resume. Examples may be left out or come several times, but every epoch must have the
        same number of steps. Evaluation has its own order, with all examples.
        """

    @stage
    def plan_batches(
        self, order: Ints, lengths: Ints, columns: Mapping[str, Any], ranks: int, train: Train
    ) -> Layouts:
        """Lay out an epoch's examples as global batches: [step][rank][micro-batch] -> examples.

        Called once per epoch, and per evaluation. Each example of `order` comes once, and every
        rank gets the same number of micro-batches; some may be empty. `lengths` are the tokens of
        each example. `columns` are those of the tokens, and "longest" and "sequences": the tokens
        of each example's longest sequence, and its number of sequences. `check`, `plan` and `tune`
        lay out estimates, where columns of `add_columns` are 0.
        """

    @stage
    def load_batches(self, build: Build, steps: range) -> LoadedSteps:
        """Iterate over `build(step)` of every step, in order, once, and per evaluation.

        `build` is pure and may be called ahead of time.
        """

    @stage
    def collate(self, tokens: Tokens, examples: Ints, pad: int) -> Batch:
        """Turn the examples of a micro-batch into tensors; none give a batch without targets.

        Perhaps called ahead of its step, in another thread: draw no random numbers. The targets of
        a batch are those of `examples`, in their order, each at its own token; others are refused.
        """

    @stage
    def step(self, model: Module, batch: Batch, denominator: float, token_nll: TokenNll) -> Tensor:
        """Return a micro-batch's loss: the sum over its targets, divided by `denominator`.

        Called for each micro-batch, in evaluations too, where `denominator` is that of all rows.
        `token_nll` calls the next stage. If an example has a weight other than 1,
        `batch["_target_weights"]` has the weight of each target; `denominator` counts a target as
        often as its weight says.
        """

    @stage
    def token_nll(self, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Return -log p of each target in float32, in order; or their sum, if `summed`.

        Called inside `step`, as often as it asks.
        """

    @stage
    def use_weights(self, run: Run, purpose: Purpose, work: Callable[[], Any]) -> Any:
        """Return `work()`, done with other weights in place, such as an average.

        Called around each evaluation, generation and the saving of the model: `purpose` is
        "evaluate", "generate" or "save". A wrapper needs two lines: `with
        run.model.swapped(self.average):`, and in it `return (yield)`. A plugin that does not call
        `work` is refused.
        """

    @notice
    def add_metrics(self, run: Run) -> dict[str, Any]:
        """Return sums over this rank's micro-batches since the last call; same names on all ranks.

        Called after the backward passes of each step and, with `run.model.module.training` False,
        at the end of each evaluation; all ranks take part there, so it may generate. A sum is a
        number, or a tensor of one number, which need not wait for the device. The core adds up all
        ranks and divides by the `denominator` that `step` got; of a pair (sum, count) by the count.
        It logs the results, those of an evaluation as `eval_NAME`, and `checkpoint.keep_best` may
        name them. The names are declared in @plugin(metrics=[...]); others are refused.
        """

    @notice
    def ready(self, run: Run) -> None:
        """Prepare: all is loaded, and the next step is `run.step + 1`; if resumed, not step 1."""

    @notice
    def stepped(self, run: Run) -> None:
        """Look at `run.step` or the weights after an optimizer step. The work counts as step time.

        Its loss and gradient norm may still be on the device: if one is not finite, the optimizer
        has skipped the step, and the run ends in the next one, or before anything is saved.
        """

    @notice
    def logged(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        """Receive the metrics of a step, or of an evaluation ("eval_loss"), on every rank.

        Speed and memory differ between ranks; all other metrics are the same. The work does not
        count as step time. A step's numbers are read while the next step runs, so that a GPU never
        waits for the host: after its backward pass, before its optimizer step. So `run.step` and
        the weights are those of `step`, but gradients take memory. They are read at once before an
        evaluation, a checkpoint and the end; under ZeRO-3; with an optimizer that is none of
        torch's fused ones; and if a plugin provides "early_stop". Else `run.stop` ends the run one
        step later. A step whose loss or gradient norm is not finite is not logged: it changes no
        weight, the run fails, and `finished` gets "failed".
        """

    @notice
    def saved(self, run: Run, folder: Path, kind: Kind, step: int) -> None:
        """Copy or report a checkpoint or the final model, complete in `folder`.

        `kind` is "checkpoint" or "model". Checkpoints are written in the background: `run.step` may
        be later than `step`.
        """

    @notice
    def finished(self, run: Run, status: Status) -> None:
        """Clean up at the end: `status` is "completed", "stopped" (by a signal) or "failed".

        After `run.stop`, it is "completed" too. Other ranks may have ended already unless it is
        "completed".
        """

    @notice
    def state_dict(self) -> dict[str, Any]:
        """Return what the plugin keeps in checkpoints, by names of its own choice.

        Called as a checkpoint is saved, before `saved`. It is JSON and tensors, which must be the
        same on all ranks. A `WeightSlice` is this rank's part of a tensor with the shape of a
        weight, and is resharded. What the plugin's optimizer keeps outside of the states of weights
        belongs here, too.
        """

    @notice
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called as the run resumes, before `ready`.

        If the best checkpoint becomes the model, it is called twice at the end: with the state of
        that checkpoint before the model is saved, and with the state of the last step after it. So
        `finished` and `summary` see the whole run.
        """

    @notice
    def summary(self) -> str | None:
        """Return a line about what the plugin did; called once the model is loaded, and at the end.

        `plugsft prepare` calls it without a model, for plugins with hooks of data.
        """
