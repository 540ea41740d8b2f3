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
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast, dataclass_transform

import pluggy
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from .base.errors import PluginError, choices
from .recipe.capabilities import ensure_complete

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
) -> Callable[[type[T]], type[T]]:
    """Turn a class into a plugin: fields are options, methods marked @hookimpl are hooks.

    `after`: plugins that come before this one in notices, and inside it in stages, which it wraps;
    `before`: those that come after it; after=["*"]: after all others.
    `requires`: plugins that must be active too. `conflicts`: plugins that must not be active ->
    reason. `needs`: package -> the extra of plugsft that installs it. `provides`: capability -> the
    option that tunes it, or None. `affects_results`: options that affect results; a resume with
    another value of these is refused. `affects_tokens`: options that affect tokens; default: all
    options of a plugin with `render` or `encode`. Declare state with `state(default)`.
    """
    for argument, names in (("after", after), ("before", before), ("requires", requires)):
        if isinstance(names, str):
            raise PluginError(f'@plugin({argument}="{names}"): write a list: ["{names}"]')
    if EVERY in (*before, *requires, *(conflicts or ())):
        raise PluginError(f'@plugin(...): "{EVERY}" is for `after` only')
    contract = Contract(
        after,
        before,
        requires,
        conflicts or {},
        needs or {},
        provides or {},
        affects_results,
        affects_tokens,
    )
    config = ConfigDict(
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        # pydantic checks the types of state too; these may be any class.
        arbitrary_types_allowed=True,
    )

    def declare(cls: type[T]) -> type[T]:
        try:
            plugin_class: Any = pydantic_dataclass(kw_only=True, config=config)(cls)
        except ValueError as error:
            raise _explain_default(error, cls) from error
        _ensure_names_exist(contract, plugin_class)
        setattr(plugin_class, PLUGIN, contract)
        return cast("type[T]", plugin_class)

    return declare


def _explain_default(error: ValueError, cls: type[Any]) -> Exception:
    """Name the option whose default is a list, a table or a set; dataclasses refuse these."""
    message = re.match(r"mutable default <class '(\w+)'> for field (\w+)", str(error))
    if message is None:
        return error
    kind, option = message.groups()
    return PluginError(
        f"class {cls.__name__}: {option}: write field(default_factory={kind}), from dataclasses"
    )


def _ensure_names_exist(contract: Contract, cls: Any) -> None:
    """Refuse names in the contract that are no options of the plugin, or no capabilities."""
    where = f"class {cls.__name__}: @plugin("
    try:
        ensure_complete(contract.provides)
    except PluginError as error:
        raise PluginError(f"{where}provides=...): {error}") from error
    options = [field.name for field in dataclasses.fields(cls) if field.init]
    named = {
        "affects_results": contract.affects_results,
        "affects_tokens": contract.affects_tokens or (),
        "provides": [option for option in contract.provides.values() if option is not None],
    }
    for argument, names in named.items():
        for name in names:
            if name not in options:
                raise PluginError(
                    f"{where}{argument}=...) names '{name}', which is no "
                    f"option{choices(name, options, 'options:')}"
                )


def state(default: Any = None) -> Any:
    """Declare an attribute of a plugin that is not an option; each run gets its own copy."""
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
        """Check the recipe before anything is loaded; raise RecipeError to refuse it."""

    @stage
    def cache(
        self, key: dict[str, Any], build: Callable[..., bool], read: Callable[..., Any]
    ) -> Any:
        """Return `read(folder, in_memory)` of a key's cache entry; its result is usually tokens.

        Before, `build(folder, is_complete)` makes the entry if it is not there: one of all
        processes that ask for it does, or each a part; True where this one did.
        """

    @stage
    def tokenize(self, slices: list[Slice], work: ShardWriter) -> list[Shard]:
        """Call `work` on every slice, in any process; return the shards in the order of slices."""

    @stage
    def render(self, rows: list[Row], tokenizer: Tokenizer, data: Data) -> Rendered | None:
        """Turn rows into texts with trained spans, and columns of numbers or booleans.

        Return None for rows of another format.
        """

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
    def schedule(self, train: Train, steps: int) -> Callable[[int], float]:
        """Return the learning rate as a share of its peak, for each step, counted from 0.

        The logged learning rate is the one that was applied. A pure function of the step: all
        shares are computed before step 1, in a resumed run too.
        """

    @stage
    def add_columns(self, model: RunModel, tokens: Tokens, ranks: Ranks) -> Tokens:
        """Add columns that need the model, before step 1; return the tokens."""

    @stage
    def order_examples(self, tokens: Tokens, epoch: int, seed: int) -> Ints:
        """Return the indices of an epoch's examples, in order; the first epoch is 0.

        A pure function of its arguments, so that runs resume. Examples may be left out or come
        several times, but every epoch must have the same number of steps. Evaluation has its own
        order, with all examples.
        """

    @stage
    def plan_batches(
        self, order: Ints, lengths: Ints, columns: Mapping[str, Any], ranks: int, train: Train
    ) -> Layouts:
        """Lay out an epoch's examples as global batches: [step][rank][micro-batch] -> examples.

        `order` is the epoch's order, `lengths` the tokens of each example. `columns` are those of
        the tokens, and "longest" and "sequences": the tokens of each example's longest sequence,
        and its number of sequences. `check`, `plan` and `tune` lay out estimates, where columns of
        `add_columns` are 0. Every rank gets the same number of micro-batches; some may be empty.
        """

    @stage
    def load_batches(self, build: Build, steps: range) -> LoadedSteps:
        """Iterate over `build(step)` in order. `build` is pure and may be called ahead of time."""

    @stage
    def collate(self, tokens: Tokens, examples: Ints, pad: int) -> Batch:
        """Turn examples into tensors; no examples give a batch without targets.

        The targets of a batch are in the order of `examples`.
        """

    @stage
    def step(self, model: Module, batch: Batch, denominator: float, token_nll: TokenNll) -> Tensor:
        """Return a micro-batch's loss: the sum over its targets, divided by `denominator`.

        `token_nll` calls the next stage. If an example has a weight other than 1,
        `batch["_target_weights"]` has the weight of each target; `denominator` counts a target as
        often as its weight says.
        """

    @stage
    def token_nll(self, model: Module, batch: Batch, summed: bool) -> Tensor:
        """Return -log p of each target in float32, in order; or their sum, if `summed`."""

    @stage
    def use_weights(self, run: Run, purpose: Purpose, work: Callable[[], Any]) -> Any:
        """Return `work()`, which evaluates, generates or saves with the weights in place.

        A wrapper puts other weights in place before its yield, and the trained ones back after it.
        """

    @notice
    def add_metrics(self) -> dict[str, Tensor | float]:
        """Return sums over this rank's micro-batches since the last call; same names on all ranks.

        A sum is a number, or a tensor of one number, which need not wait for the device.
        The core sums them over ranks, divides by the step's `denominator`, and logs them; metrics
        of an evaluation as `eval_NAME`. A name that another metric has is refused.
        """

    @notice
    def ready(self, run: Run) -> None:
        """Prepare: all is loaded, and the next step is `run.step + 1`."""

    @notice
    def stepped(self, run: Run) -> None:
        """React to an optimizer step; the work counts as step time.

        Its loss and gradient norm may still be on the device: if one is not finite, the optimizer
        has skipped the step, and the run ends in the next one, or before anything is saved.
        """

    @notice
    def logged(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        """Receive the metrics of a step, or of an evaluation after it, on every rank.

        Speed and memory differ between ranks; all other metrics are the same. The work does not
        count as step time. A step's numbers are read while the next step runs: after its backward
        pass, before its optimizer step. So `run.step` and the weights are those of `step`. They are
        read at once before an evaluation, a checkpoint and the end; with an optimizer that cannot
        skip a step; and if a plugin provides "early_stop".
        """

    @notice
    def evaluated(self, run: Run, metrics: dict[str, Any]) -> None:
        """Receive the metrics of an evaluation, the same on every rank."""

    @notice
    def saved(self, run: Run, folder: Path, kind: Kind, step: int) -> None:
        """React to a checkpoint or the final model, complete in `folder`.

        Checkpoints are written in the background: `run.step` may be later than `step`.
        """

    @notice
    def finished(self, run: Run, status: Status) -> None:
        """React to the end; all ranks are still there only if `status` is "completed".

        After `run.stop`, the status is "completed" too.
        """

    @notice
    def state_dict(self) -> dict[str, Any]:
        """Return what the plugin keeps in checkpoints, by names of its own choice.

        Plain values and tensors must be the same on all ranks. A `WeightSlice` is this rank's part
        of a tensor with the shape of a weight, and is resharded.
        """

    @notice
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called as the run resumes, before `ready`.

        If the best checkpoint becomes the model, it is called twice at the end: with the state of
        that checkpoint before the model is saved, and with the state of the last step after it.
        """

    @notice
    def summary(self) -> str | None:
        """Return a line about what the plugin did; called once the model is loaded, and at the end.

        `plugsft prepare` calls it without a model, for plugins with hooks of data.
        """
