"""A recipe and its variants, foreseen: what each strategy would hold and take, what would fit."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...base.errors import PlugsftError
from ...base.machine import look
from ...batches.defaults import BatchDefaults
from ...batches.plan import shuffled
from ...data.defaults import DataDefaults
from ...data.load_tokenizer import load_tokenizer
from ...model.config import load_config
from ...model.defaults import ModelDefaults
from ...model.load import scratch_config
from ...output.bottlenecks import capacity
from ...recipe.tables import Recipe
from ...registry import active as registry
from ...tokens.store import Tokens
from ..trials.runner import changed, trials
from .chips import GB, Cluster, Took, took
from .meta_model import Ghost, Weights
from .peak_memory import Trace
from .strategies import CPU_DDP, DDP, FSDP2, ONE, ZERO2, ZERO3, Parts, Setting, Strategy, held
from .workload import Rows, Workload, workload

APART = ("flash_attention", "fused_loss", "liger", "compile", "tracker")
"""Plugins that want the very machine, or weights: what they do to memory is known without them."""
HOOKS = ("optimize_model", "batches", "collate", "step")
SPARE = {True: 1.5 * GB, False: 0.75 * GB}
"""Bytes that are no tensors of a run: driver, NCCL and the allocator's gaps on a GPU; Python with
its libraries on a host."""
MOST = 4096
"""Ranks that are tried, where more are a cure."""
STEPS = 3
"""Of a probe: the first warms up, and makes the optimizer's states."""
SAVERS = ("gradient_checkpointing", "fused_loss")


@dataclass(frozen=True)
class Outcome:
    """What one strategy comes to."""

    strategy: Strategy
    parts: Parts
    seconds: Took
    fits: bool
    tokens: float
    """Of a step."""


class Seen(NamedTuple):
    """Weights, batches and traces of a recipe on some ranks."""

    weights: Weights
    load: Workload
    traces: dict[bool, Trace]
    """With the stored weights (False), and as cast by FSDP2 and DeepSpeed (True)."""


class Found(NamedTuple):
    """What a probe has found, against its forecast."""

    memory: float
    forecast: float
    seconds: float
    expected: float
    scale: float


class Scope:
    """A recipe and its variants, each looked at once."""

    def __init__(self, tables: dict[str, Any], rows: Rows, gpu: bool) -> None:
        self.tables, self.rows, self._gpu = tables, rows, gpu
        self._ghosts: dict[str, dict[bool, Ghost]] = {}
        self._traces: dict[str, Trace] = {}
        self.scale = 1.0
        """What a probe has found activations to be, for one byte that is forecast."""

    def see(self, changes: Mapping[str, Any], ranks: int) -> tuple[Recipe, Seen]:
        """Look at the recipe with {"table.key": value} set."""
        tables = changed(self.tables, changes)
        recipe, _ = registry.resolve(tables)
        _, active = registry.resolve(tables, [name for name in APART if recipe.has(name)])
        active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults())
        registry.check(active, recipe, replace(look(), world_size=ranks), HOOKS)
        load = workload(recipe, active, self.rows, ranks)
        key = repr(sorted(changes.items()))
        if key not in self._ghosts:
            cast = recipe.model.dtype != recipe.model.weights and ranks > 1
            self._ghosts[key] = {
                sharded: Ghost(recipe, active, self._config(recipe), sharded)
                for sharded in ([False, True] if cast else [False])
            }
        ghosts, traces = self._ghosts[key], dict[bool, Trace]()
        shape = {name: getattr(one, "shape", one) for name, one in load.batch.items()}
        half, device = recipe.model.dtype != "float32", "cuda" if self._gpu else "cpu"
        flash = recipe.has("flash_attention") and self._gpu and half
        for sharded in (False, True):
            ghost = ghosts.get(sharded, ghosts[False])
            traced = f"{key} {shape} {ghost is ghosts[False]}"
            if traced not in self._traces:
                self._traces[traced] = ghost.trace(load.batch, device, flash)
            traces[sharded] = self._traces[traced]
        return recipe, Seen(ghosts[False].weights(), load, traces)

    def forecast(self, changes: Mapping[str, Any], cluster: Cluster, room: float) -> list[Outcome]:
        """Return what each strategy would hold and take."""
        recipe, seen = self.see(changes, cluster.ranks)
        half = recipe.model.dtype != "float32"
        at = Setting(
            cluster.ranks,
            seen.load.micro,
            cluster.chip.gpu,
            self.scale,
            2 if half else 4,
            recipe.train.keep_whole_gradients,
        )
        found = []
        for one in strategies(cluster, recipe):
            trace = seen.traces[one.sharded]
            parts = held(one, seen.weights, trace, at)
            seconds = took(one, seen.weights, trace, seen.load, cluster, at)
            fits = parts.total + SPARE[cluster.chip.gpu] <= room
            found.append(Outcome(one, parts, seconds, fits, seen.load.tokens))
        return found

    def _config(self, recipe: Recipe) -> Any:
        if recipe.model.scratch:
            return scratch_config(recipe.model.scratch, self.rows.vocabulary)
        return load_config(recipe.model)


def strategies(cluster: Cluster, recipe: Recipe) -> list[Strategy]:
    """Return the strategies for a cluster."""
    if cluster.ranks == 1:
        return [ONE]
    if recipe.model.weights == "bfloat16":  # DeepSpeed stores float32
        return [DDP, FSDP2] if cluster.chip.gpu else [CPU_DDP, FSDP2]
    return [DDP, ZERO2, ZERO3, FSDP2] if cluster.chip.gpu else [CPU_DDP, ZERO3, FSDP2]


def best_of(found: Sequence[Outcome]) -> Outcome | None:
    """Return the fastest that fits and can be launched."""
    able = [one for one in found if one.fits and one.strategy is not ZERO2]
    # What is as fast to a hundredth is not faster.
    return min(
        able, key=lambda one: (round(log(one.seconds.total), 2), one.parts.total), default=None
    )


def cures(
    scope: Scope, recipe: Recipe, cluster: Cluster, room: float
) -> Iterator[tuple[str, Outcome]]:
    """Yield lines to change, one at a time and then together, with what would come of each."""
    savers: dict[str, Any] = {f"plugins.{name}": {} for name in SAVERS if not recipe.has(name)}
    lower = _smaller(scope, recipe, cluster, room)
    tried: list[tuple[str, dict[str, Any]]] = [(_line(lower), lower)] if lower else []
    tried += [(f"[{name}]", {name: {}}) for name in savers]
    if len(savers) > 1 or (savers and lower):
        lines = [f"[{name}]" for name in savers] + [_line(lower)] * bool(lower)
        tried.append((" and ".join(lines), {**savers, **lower}))
    if not recipe.has("lora"):
        name = "[plugins.lora] (affects results)"
        tried += [(name, {"plugins.lora": {}})]
        tried += [(f"{name} and all of these", {**savers, **lower, "plugins.lora": {}})]
    for words, changes in tried:
        if (one := _least(scope, changes, cluster, room)) is not None:
            yield words, one
    for words, changes in (("", {}), (", and all of these but LoRA", {**savers, **lower})):
        more, best = cluster, None
        while more.ranks < MOST and not (best and best.fits):
            more = more.doubled()
            best = _least(scope, changes, more, room)
        if best is not None:
            yield f"--gpus {more.machines}x{more.each}{words}", best


def _smaller(scope: Scope, recipe: Recipe, cluster: Cluster, room: float) -> dict[str, Any]:
    """Return the largest smaller micro-batch that fits, or the smallest there is."""
    packing = recipe.plugins.get("bfd_packing")
    key = "plugins.bfd_packing.capacity" if packing is not None else "train.micro_batch"
    size = capacity(recipe) if packing is not None else recipe.train.micro_batch
    found: dict[str, Any] = {}
    while size > 1:
        size //= 2
        one = _least(scope, {key: size}, cluster, room)
        if one is None:  # an example is longer
            break
        found = {key: size}
        if one.fits:
            break
    return found


def _line(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in changes.items())


def _least(
    scope: Scope, changes: Mapping[str, Any], cluster: Cluster, room: float
) -> Outcome | None:
    """Return the strategy that is best, or that holds least where none fits; None if refused."""
    try:
        found = scope.forecast(changes, cluster, room)
    except PlugsftError:
        return None
    able = [one for one in found if one.strategy is not ZERO2]
    return best_of(found) or min(able, key=lambda one: one.parts.total)


def probe(tables: dict[str, Any], cluster: Cluster) -> Found:
    """Train real steps of one rank's share on this machine; compare them with their forecast."""
    recipe, active = registry.resolve(tables)
    size = max(1, recipe.train.batch_size // cluster.ranks)
    alone = replace(cluster, machines=1, each=1)
    with trials(recipe, active, examples=size * STEPS) as made:
        trial = made.run({"train.batch_size": size}, STEPS)
        tokens = Tokens(Path(made.tables["data"]["tokens"]))
        named, _ = registry.resolve(made.tables)
        vocabulary = len(load_tokenizer(named.model, Path()))
        sources = [(one["examples"], one["weight"]) for one in tokens.facts["sources"]]
        order = shuffled(sources, recipe.train.seed, 0)
        rows = Rows(tokens, np.arange(len(tokens)), order, vocabulary, True)
        scope = Scope(made.tables, rows, cluster.chip.gpu)
        if trial.error:
            why = "ran out of memory" if trial.out_of_memory else f"failed: {trial.error}"
            raise PlugsftError(
                f"--probe: a step of {size} examples {why}; leave --probe out, or lower "
                "train.micro_batch, or plugins.bfd_packing.capacity, for it"
            )
        [one] = scope.forecast({"train.batch_size": size}, alone, 0)
    [rank] = trial.ranks
    memory = rank["device"] if cluster.chip.gpu else rank["host"] - rank["before"]
    moving = one.parts.activations + one.parts.head
    # Where these are next to nothing, what is off is not theirs.
    far = moving > 0.1 * one.parts.total
    scale = max(0.1, 1 + (memory - one.parts.total) / moving) if far else 1.0
    seconds = statistics.median(trial.of("step_seconds", warmup=1))
    return Found(memory, one.parts.total, seconds, one.seconds.total, scale)
