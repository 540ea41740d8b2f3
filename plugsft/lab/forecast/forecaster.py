"""Forecast a recipe and its variants; find changes that make it fit.

A forecast is for the largest micro-batches of an epoch. Prepared tokens give every length;
otherwise the first rows of each source represent the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...base.errors import DataError, PlugsftError
from ...base.machine import look
from ...base.types import Batch, Ints, Shard, Slice
from ...batches.defaults import BatchDefaults
from ...batches.plan import shuffle
from ...data.defaults import DataDefaults
from ...data.prepare import open_data, open_named_tokens
from ...data.sample import EstimatedColumns, make_work
from ...data.sources import ensure_columns, open_source
from ...model.config import load_config
from ...model.defaults import ModelDefaults
from ...model.load import scratch_config
from ...recipe.capabilities import Capability
from ...recipe.tables import Recipe
from ...registry import active as registry
from ...registry.active import Active
from ...registry.load import resolve
from ...tokens.shards import write_index
from ...tokens.store import Tokens
from ...tokens.views import cut, share_prompts
from ..trials import Changes, with_changes
from .meta_model import MetaModel, Trace, Weights
from .strategies import DDP, FSDP2, SINGLE, ZERO3, Cluster, Memory, Setting, Strategy, peak_memory

SAMPLE = 100
"""Rows of each source that are rendered and encoded."""
PLANNED_STEPS, RANK_STEPS = 64, 2**15
"""Most steps of an epoch that are laid out, and most steps times ranks."""
LEFT_OUT = (
    "fast_attention",
    "fused_head",
    "fused_kernels",
    "compiled_layers",
    "external_reports",
    "offloaded_activations",
)
"""Capabilities that need the real machine or weights: a model is traced without their plugins."""
HOOKS = ("optimize_model", "plan_batches", "collate", "step")
MAX_RANKS = 4096
"""Most ranks that are tried."""
SAVERS = ("recomputed_activations", "fused_head")
"""Capabilities that lower the memory, and change no results."""


@dataclass(frozen=True)
class Epoch:
    """The examples of an epoch; a sample may represent all of them."""

    tokens: Tokens
    examples: Ints
    """[example of the epoch]: its number in `tokens`."""
    order: Ints
    vocabulary: int
    """Entries of the tokenizer."""
    is_complete: bool
    """Whether all lengths are known."""


@dataclass(frozen=True)
class Workload:
    """The steps of an epoch, as the ranks see them."""

    batch: Batch
    """The largest micro-batch."""
    micro_batches: int
    """Micro-batches of a rank in a step, at most."""
    tokens: float
    """Mean of a step, without padding."""
    idle_ranks: int
    """Ranks that never get an example."""


def read_epoch(recipe: Recipe, active: Active, folder: Path) -> Epoch:
    """An epoch's examples: from prepared tokens, or from a sample of each source."""
    if recipe.data.tokens:
        data = open_data(recipe, active)
        tokens, vocabulary = open_named_tokens(recipe, data, active), len(data.tokenizer)
        order = active.hooks.order_examples(tokens=tokens, epoch=0, seed=recipe.train.seed)
        examples = np.arange(len(tokens))
    else:
        tokens, examples, vocabulary = _sample(recipe, active, folder)
        order = shuffle([(len(examples), 1.0)], recipe.train.seed, 0)
    if recipe.provides("shared_prompts"):
        tokens = share_prompts(tokens)
    return Epoch(tokens, examples, order, vocabulary, is_complete=bool(recipe.data.tokens))


def _sample(recipe: Recipe, active: Active, folder: Path) -> tuple[Tokens, Ints, int]:
    """Encode the first rows of each source; repeat their examples to the number of all.

    The last value is the number of the tokenizer's entries.
    """
    sources = recipe.data.all_sources()
    opened = [open_source(source) for source in sources]
    ensure_columns(recipe.data, opened)
    work = make_work(recipe, active, opened, folder, SAMPLE)
    work.folder = folder / "sample"
    work.folder.mkdir()
    shards, facts, examples, first = list[Shard](), list[dict[str, Any]](), list[Ints](), 0
    for number, (rows, source) in enumerate(zip(opened, sources, strict=True)):
        count = min(SAMPLE, len(rows))
        shard = work.tokenize(Slice(number, 0, count, rows.part(0, count)))
        shards.append(shard)
        facts.append({"name": source.source, "weight": source.weight, "examples": shard.examples})
        per_row = shard.examples / max(1, count)
        total = round(source.weight * len(rows) * per_row)
        examples.append(first + np.resize(np.arange(shard.examples), total))
        first += shard.examples
    if not first:
        read = sum(shard.rows for shard in shards)
        raise DataError(
            f"data: none of the first {read:,} rows can be used; plugsft check names the reasons"
        )
    write_index(work.folder, shards, {"key": "", "sources": facts})
    return Tokens(work.folder), np.concatenate(examples), len(work.tokenizer)


def workload_of(recipe: Recipe, active: Active, epoch: Epoch, ranks: int) -> Workload:
    """Lay out steps of an epoch; find the largest micro-batch."""
    lengths = epoch.tokens.lengths[epoch.examples]
    columns = {name: of[epoch.examples] for name, of in epoch.tokens.plan_columns().items()}
    layouts = active.hooks.plan_batches(
        order=epoch.order,
        lengths=lengths,
        columns=EstimatedColumns(lengths, columns),
        ranks=ranks,
        train=recipe.train,
    )
    packed = recipe.provides("packed_rows") is not None
    all_tokens = _cut(recipe, epoch.tokens) if packed else epoch.tokens
    lengths = all_tokens.lengths[epoch.examples]
    count = max(2, min(PLANNED_STEPS, RANK_STEPS // ranks))
    steps = np.unique(np.linspace(0, len(layouts) - 1, count).astype(np.int64)).tolist()
    busy, micro_batches, tokens = np.zeros(ranks, np.bool_), 0, 0
    sized: list[tuple[tuple[int, int], Ints]] = []
    for step in steps:
        for rank, parts in enumerate(layouts[step]):
            micro_batches = max(micro_batches, len(parts))
            for part in parts:
                documents = lengths[part]
                busy[rank] |= len(documents) > 0
                tokens += int(documents.sum())
                sized.append((_size(documents, packed), epoch.examples[part]))
    batch = _largest(active, all_tokens, sized)
    return Workload(batch, micro_batches, tokens / len(steps), ranks - int(busy.sum()))


def _cut(recipe: Recipe, tokens: Tokens) -> Tokens:
    """Cut examples that a packed row cannot hold, as its plugin does before the first step."""
    size = recipe.packed_capacity()
    if not (tokens.lengths > size).any():
        return tokens
    numbers = np.arange(len(tokens))
    return cut(tokens, numbers, 0 * numbers, np.minimum(tokens.lengths, size))


def _size(lengths: Ints, packed: bool) -> tuple[int, int]:
    """A micro-batch's tokens with padding, and the pairs that attention compares."""
    if packed:
        return int(lengths.sum()), int((lengths**2).sum())
    longest = int(lengths.max(initial=0))
    return len(lengths) * longest, len(lengths) * longest**2


def _largest(active: Active, tokens: Tokens, sized: list[tuple[tuple[int, int], Ints]]) -> Batch:
    """Collate the largest micro-batch: the one with most tokens, then most attention.

    A plugin may pad all rows to one length, so the batches are compared.
    """
    most_attention = max(sized, key=lambda part: part[0][::-1])
    most_tokens = max(sized, key=lambda part: part[0])
    batches = [
        active.hooks.collate(tokens=tokens, examples=part, pad=0)
        for _, part in (most_attention, most_tokens)
    ]
    return max(batches, key=lambda batch: batch["input_ids"].numel())


@dataclass(frozen=True)
class Forecast:
    """The peak memory of a rank under one strategy."""

    strategy: Strategy
    memory: Memory
    fits: bool


class Traced(NamedTuple):
    """Weights, batches and traces of a recipe on some ranks."""

    weights: Weights
    workload: Workload
    traces: dict[bool, Trace]
    """With stored weights (False), and as cast by FSDP2 and DeepSpeed (True)."""


class Forecaster:
    """Forecasts a recipe and variants of it; each is traced once."""

    def __init__(self, tables: dict[str, Any], epoch: Epoch, gpu: bool) -> None:
        self.tables, self.epoch, self._gpu = tables, epoch, gpu
        self._models: dict[tuple[str, bool], MetaModel] = {}
        self._traces: dict[str, Trace] = {}

    def trace(self, changes: Changes, ranks: int) -> tuple[Recipe, Traced]:
        """Trace the recipe with {"table.key": value} set."""
        tables = with_changes(self.tables, changes)
        recipe, _ = resolve(tables)
        left_out = {each.plugin for name in LEFT_OUT for each in recipe.providers(name)}
        _, active = resolve(tables, [*left_out])
        active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults())
        registry.check(active, recipe, replace(look(), world_size=ranks), HOOKS)
        workload = workload_of(recipe, active, self.epoch, ranks)
        shape = {name: getattr(value, "shape", value) for name, value in workload.batch.items()}
        half, device = recipe.model.dtype != "float32", "cuda" if self._gpu else "cpu"
        flash = recipe.provides("fast_attention") is not None and self._gpu and half
        key, traces = repr(sorted(changes.items())), dict[bool, Trace]()
        for strategy_casts in (False, True):
            casts = strategy_casts and recipe.model.dtype != recipe.model.weights and ranks > 1
            if (key, casts) not in self._models:
                if new := recipe.model.scratch:
                    config: Any = scratch_config(new, self.epoch.vocabulary)
                else:
                    config = load_config(recipe.model)
                self._models[key, casts] = MetaModel(recipe, active, config, casts)
            traced = f"{key} {shape} {casts}"
            if traced not in self._traces:
                model = self._models[key, casts]
                self._traces[traced] = model.trace(workload.batch, device, flash)
            traces[strategy_casts] = self._traces[traced]
        return recipe, Traced(self._models[key, False].weights(), workload, traces)

    def forecast(self, changes: Changes, cluster: Cluster) -> list[Forecast]:
        """Forecast each strategy."""
        recipe, traced = self.trace(changes, cluster.ranks)
        setting = Setting(
            cluster.ranks,
            traced.workload.micro_batches,
            cluster.gpu,
            4 if recipe.model.dtype == "float32" else 2,
            recipe.train.keep_whole_gradients,
        )
        forecasts = []
        for strategy in strategies(cluster, recipe):
            trace = traced.traces[strategy.casts_weights]
            memory = peak_memory(strategy, traced.weights, trace, setting)
            fits = memory.total + cluster.reserved <= cluster.memory
            forecasts.append(Forecast(strategy, memory, fits))
        return forecasts


def strategies(cluster: Cluster, recipe: Recipe) -> list[Strategy]:
    """The strategies that fit a cluster, first the one that communicates least."""
    if cluster.ranks == 1:
        return [SINGLE]
    if recipe.provides("quantized_base"):
        return [DDP]  # quantized weights are not sharded
    # DeepSpeed stores trained weights in float32.
    return [DDP, FSDP2] if recipe.model.weights == "bfloat16" else [DDP, FSDP2, ZERO3]


def choose(forecasts: Sequence[Forecast]) -> Forecast | None:
    """The first that fits communicates least."""
    return next((forecast for forecast in forecasts if forecast.fits), None)


def suggest(
    forecaster: Forecaster, recipe: Recipe, cluster: Cluster
) -> Iterator[tuple[str, Forecast]]:
    """Yield changes, one at a time and then together, and the forecast with each."""
    table = {name: f"plugins.{Capability.bundled(name).plugin}" for name in (*SAVERS, "adapters")}
    savers: list[Changes] = [{table[name]: {}} for name in SAVERS if not recipe.provides(name)]
    variants = [_smaller_micro_batch(forecaster, recipe, cluster), *savers]
    together = {key: value for changes in variants for key, value in changes.items()}
    variants.append(together)
    if not recipe.provides("adapters"):
        adapters: Changes = {table["adapters"]: {}}
        variants += [adapters, together | adapters]
    for words, changes in {_words(changes): changes for changes in variants if changes}.items():
        if (forecast := _best(forecaster, changes, cluster)) is not None:
            affects = " (affects results)" * (table["adapters"] in changes)
            yield words + affects, forecast
    for changes in {}, together:
        larger, best = cluster, None
        while larger.ranks < MAX_RANKS and not (best and best.fits):
            larger = larger.doubled()
            best = _best(forecaster, changes, larger)
        if best is not None:
            gpus = f"--gpus {larger.machines}x{larger.per_machine}"
            yield " and ".join([gpus, *[_words(changes)] * bool(changes)]), best


def _smaller_micro_batch(forecaster: Forecaster, recipe: Recipe, cluster: Cluster) -> Changes:
    """The change to the largest smaller micro-batch that fits, or to the smallest."""
    key, size = recipe.micro_batch_size()
    changes: Changes = {}
    while size > 1:
        size //= 2
        forecast = _best(forecaster, {key: size}, cluster)
        if forecast is None:  # an example is longer
            break
        changes = {key: size}
        if forecast.fits:
            break
    return changes


def _words(changes: Changes) -> str:
    return " and ".join(
        f"[{key}]" if value == {} else f"{key} = {value}" for key, value in changes.items()
    )


def _best(forecaster: Forecaster, changes: Changes, cluster: Cluster) -> Forecast | None:
    """The chosen strategy, or the smallest where none fits; None if refused."""
    try:
        forecasts = forecaster.forecast(changes, cluster)
    except PlugsftError:
        return None
    return choose(forecasts) or min(forecasts, key=lambda forecast: forecast.memory.total)
