"""Global batches with this rank's tensors, through the hook that may load them ahead.

An out-of-memory error names the micro-batch and the settings that lower memory.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import xxhash
from accelerate import Accelerator
from torch import Tensor

from ..base.errors import PluginError, TrainError, out_of_memory
from ..base.types import Batch, Build, Ints, LoadedStep, StepPlan
from ..batches.labels import target_places
from ..hooks import Hooks, with_plugins
from ..recipe.capabilities import Capability
from ..recipe.tables import Recipe, short
from ..tokens.store import Tokens

MAX_ROWS = 20
"""Most rows that a message names."""
SHOWN = 8
"""Most documents that a message names."""
SAVERS = {
    "recomputed_activations": "activations are computed again, not stored",
    "fused_head": "whole logits are never stored",
    "adapters": "few weights have gradients and optimizer states",
}
"""Capabilities that lower a step's memory, and how."""
SHARD = "more ranks with a sharded model (recipes/accelerate/fsdp2.yaml)"


@dataclass
class GlobalBatch:
    """The examples of one step, with this rank's micro-batches."""

    plan: StepPlan
    micro_batches: list[Batch]
    tokens: Tokens
    """Where the examples come from."""
    rank: int
    started: float
    """Clock time when the loop asked for this batch."""
    waited: float
    """Seconds that the loop waited for it."""
    logging: float = 0.0
    """Seconds of this step in which the one before was logged."""

    @property
    def step(self) -> int:
        """The number of the step, from 1."""
        return self.plan.step

    def counts(self) -> dict[str, float]:
        """What this rank adds to the numbers of the step."""
        # Padding is computed, too.
        computed = sum(batch["input_ids"].numel() for batch in self.micro_batches)
        return {"computed_tokens": computed, "data_wait_seconds": self.waited}

    def compared(self) -> dict[str, str]:
        """Describe what is the same on all ranks."""
        micro_batches = [examples.tobytes() for examples in chain(*self.plan.layout)]
        layout = xxhash.xxh3_64_hexdigest(b"|".join(micro_batches))
        return {f"the layout of step {self.step}": layout}

    def rows(self) -> str:
        """Name the rows of all ranks."""
        return name_source_rows(self.tokens, chain(*chain(*self.plan.layout)))


class BatchLoader:
    """Loads this rank's micro-batches of each step."""

    def __init__(self, hooks: Hooks, accelerator: Accelerator, pad: int, packed: bool) -> None:
        self.hooks, self._pad, self._packed = hooks, pad, packed
        self._rank, self._device = accelerator.process_index, accelerator.device

    def load(
        self,
        plan_step: Callable[[int], StepPlan],
        tokens: Tokens,
        steps: range,
        agree: Callable[[str], AbstractContextManager[None]],
    ) -> Generator[GlobalBatch, None, None]:
        """Iterate over global batches, in order, with their tensors on the device.

        A batch is yielded once all ranks agree that they have made theirs, or all ranks raise.
        """
        batches = iter(self.hooks.load_batches(build=self._builder(plan_step, tokens), steps=steps))
        loader = with_plugins(self.hooks.load_batches)
        try:
            for expected in [*steps, None]:  # None: ranks come to the end together, too
                started = time.perf_counter()
                with agree("making batches"):
                    loaded = next(batches, None)
                    ensure_step(loaded, expected, loader)
                    if loaded is None:
                        return
                    layout = loaded.plan.layout[self._rank]
                    if len(loaded.batches) != len(layout):
                        raise PluginError(
                            f"{loader} gave {len(loaded.batches)} micro-batches in place of "
                            f"{len(layout)} for step {expected}; it must give all that were built"
                        )
                    for batch, examples in zip(loaded.batches, layout, strict=True):
                        if self._packed:  # again: a plugin may have made others
                            ensure_documents(batch, tokens, examples, loader)
                waited = time.perf_counter() - started
                yield GlobalBatch(loaded.plan, loaded.batches, tokens, self._rank, started, waited)
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def load_batch(self, tokens: Tokens, examples: Ints) -> Batch:
        """Make a micro-batch beside those of the steps, as `score` needs it."""
        return self._to_device(self._collate(tokens, examples))

    def _builder(self, plan_step: Callable[[int], StepPlan], tokens: Tokens) -> Build:
        """Make what a plugin may call ahead of time, in a thread or out of order."""

        def build(step: int) -> LoadedStep:
            collating: Ints | None = None
            try:
                plan, collated = plan_step(step), []
                for collating in plan.layout[self._rank]:
                    collated.append(self._collate(tokens, collating))
                collating = None
                started = time.perf_counter()
                batches = list(map(self._to_device, collated))
                return LoadedStep(plan, batches, time.perf_counter() - started)
            except Exception as error:
                note = f"as rank {self._rank} made the batches of step {step}"
                if collating is not None:
                    note += f", from {name_source_rows(tokens, collating)}"
                error.add_note(note)
                raise

        return build

    def _collate(self, tokens: Tokens, examples: Ints) -> Batch:
        batch = self.hooks.collate(tokens=tokens, examples=examples, pad=self._pad)
        if self._packed:
            ensure_documents(batch, tokens, examples, with_plugins(self.hooks.collate))
        if getattr(batch.get("labels"), "ndim", 0) != 2:  # a plugin's step may have others
            return batch
        batch = batch | {"_places": target_places(batch)}
        weights = tokens.weights(examples)
        if not (weights == 1).all():
            per_target = weights.repeat(tokens.targets[examples])
            batch["_target_weights"] = torch.from_numpy(per_target)
        return batch

    def _to_device(self, batch: Batch) -> Batch:
        moved = {
            name: to_device(value, self._device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        if "_places" in moved:
            # The labels that these are of: a plugin may replace them later.
            moved["_places_of"] = moved["labels"]
        return moved


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting: to a GPU, from pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def ensure_step(loaded: LoadedStep | None, expected: int | None, loader: str) -> None:
    """Refuse another step than the next, which `loader` lost, repeated or reordered."""
    if not isinstance(loaded, LoadedStep | None):
        raise PluginError(f"{loader} gave {short(loaded)}; it must give what build(step) returned")
    step = loaded and loaded.plan.step
    if step != expected:
        names = [f"step {number}" if number else "the end" for number in (step, expected)]
        raise PluginError(
            f"{loader} gave {names[0]} in place of {names[1]}; it must give every step, in order"
        )


def ensure_documents(batch: Batch, tokens: Tokens, examples: Ints, maker: str) -> None:
    """Refuse a packed row in which a sequence of the examples is not a document of its own.

    If `maker` has changed the tokens, documents may have other lengths, but be no fewer.
    """
    lengths = tokens.sequences(examples)[0].tolist()
    # Without boundaries, a row is one document.
    given = [*batch.get("documents", [sum(lengths)])][: len(lengths)]
    # The last document may contain the padding.
    if given[:-1] == lengths[:-1] and given[-1:] >= lengths[-1:]:
        return
    ids = tokens.gather(examples)[0]
    unchanged = np.array_equal(batch["input_ids"][0, : len(ids)].cpu(), ids)
    if unchanged or len(given) < len(lengths):
        raise PluginError(
            f"{maker} packed examples that attend to each other: their 'documents' begin with "
            f"{given[:SHOWN]} tokens in place of {lengths[:SHOWN]}; return pack(tokens, examples), "
            f"or add documents_of(...), both of {Capability.bundled('packed_rows').table}"
        )


def name_source_rows(tokens: Tokens, examples: Iterable[int]) -> str:
    """Name the rows of examples: "chats.jsonl rows 3, 17", counted from 1."""
    numbers = [*map(int, examples)]
    by_source: dict[str, list[str]] = {}
    for source, row in map(tokens.source_of, numbers[:MAX_ROWS]):
        by_source.setdefault(tokens.facts["sources"][source]["name"], []).append(str(row + 1))
    if not by_source:
        return "no row"
    names = ", ".join(f"{name} rows {', '.join(rows)}" for name, rows in by_source.items())
    more = f" and {len(numbers) - MAX_ROWS} more" if len(numbers) > MAX_ROWS else ""
    return names + more


@contextmanager
def explain_out_of_memory(
    recipe: Recipe, batch: GlobalBatch, losses: Sized, phase: str = ""
) -> Iterator[None]:
    """Name the micro-batch that ran out of memory: the first without a loss."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        cures = [
            f"a smaller {recipe.micro_batch_size()[0]}",
            f"a smaller data.max_length (now {recipe.data.max_length:,})",
            *_missing_plugins(recipe, SAVERS),
        ]
        raise TrainError(
            f"{phase}step {batch.step}, rank {batch.rank}: out of memory in "
            f"{_describe_micro_batch(batch, len(losses))}. "
            f"It needs less with {'; '.join(cures)}; {SHARD}. None changes the batch size"
        ) from error


@contextmanager
def explain_out_of_memory_in_loading(recipe: Recipe, rank: int) -> Iterator[None]:
    """Name the model that ran out of memory while loading, with the cures."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        model = recipe.model.path or "[model.scratch]"
        cures = [SHARD, *_missing_plugins(recipe, ["adapters"])]
        raise TrainError(
            f"model: out of memory while {model} was loaded on rank {rank}. It needs less with "
            f"{'; '.join(cures)}; `plugsft plan` says what each rank holds"
        ) from error


def _describe_micro_batch(batch: GlobalBatch, index: int) -> str:
    micro_batches = batch.plan.layout[batch.rank]
    if index == len(micro_batches):
        return "the optimizer's step"
    lengths = batch.tokens.lengths[micro_batches[index]]
    return (
        f"micro-batch {index + 1} of {len(micro_batches)}: {len(lengths):,} examples, "
        f"{lengths.sum():,} tokens, the longest {lengths.max(initial=0):,}"
    )


def _missing_plugins(recipe: Recipe, savers: Iterable[str]) -> list[str]:
    """Name the plugins to add for capabilities that the recipe lacks."""
    missing = [name for name in savers if not recipe.provides(name)]
    return [f"{Capability.bundled(name).table} ({SAVERS[name]})" for name in missing]
