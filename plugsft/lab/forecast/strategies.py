"""The ranks that a forecast is for, and the peak memory of a rank under each strategy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...base.console import format_count, format_size
from .meta_model import HEAD, LAYERS, Trace, Weights

GB = 10**9
PER_MACHINE = 8
"""Default number of GPUs of a machine."""

GPU_MEMORY = {
    "B200": 180,
    "H200": 141,
    "H100": 80,
    "A100": 80,
    "A100-40GB": 40,
    "MI300X": 192,
    "L40S": 48,
    "4090": 24,
    "T4": 16,
    "V100": 16,
    "V100-32GB": 32,
}
"""GB (10^9 bytes) of each GPU, from its data sheet."""
ANY = "GPU"
"""The device of a cluster, if only its memory is known."""

MIB = 2**20
LIBRARIES, GROUP = 24 * MIB, 32 * MIB
"""On a host: code, threads and tables that the first steps add, as measured; a process group."""
WORKSPACE = 64 * MIB
"""Workspace of a GPU's matrix library."""
REDUCED = 4
"""Bytes of a gradient that DeepSpeed reduces and accumulates (float32, see precision.py)."""
BUCKET, PREFETCH, REUSE = 500_000_000, 50_000_000, 1_000_000_000
"""Elements in DeepSpeed's gradient bucket, in a prefetch, and in weights that stay gathered for
reuse: its own defaults, which recipes/accelerate/zero3.yaml does not change."""


@dataclass(frozen=True)
class Cluster:
    """The machines to train on."""

    device: str
    """Name of the GPU, "GPU" for any, or "CPU"."""
    gpu: bool
    memory: float
    """Bytes of each rank."""
    machines: int
    per_machine: int
    listed: int = 0
    """GB on the data sheet, if `memory` comes from there."""

    def __str__(self) -> str:
        memory = format_size(self.memory) + " each" * (self.ranks > 1)
        if self.listed:
            memory += f" ({self.listed} GB on the data sheet)"
        if not self.gpu:
            return f"CPU: {format_count(self.ranks, 'rank')} on this machine, {memory}"
        where = f"{self.per_machine} {self.device}"
        if self.machines > 1:
            where = f"{self.machines:,} machines with {where} each"
        return f"GPUs: {where}, {memory}"

    @property
    def ranks(self) -> int:
        """Number of ranks on all machines."""
        return self.machines * self.per_machine

    @property
    def reserved(self) -> float:
        """Bytes of a rank that hold no tensors."""
        return 1.5 * GB if self.gpu else 0.75 * GB

    @property
    def reserved_for(self) -> str:
        """The owners of the reserved bytes."""
        return "driver, NCCL and gaps" if self.gpu else "Python and its libraries"

    def doubled(self) -> "Cluster":
        """Twice as many ranks: in the machine, or on more machines where it is full."""
        if self.machines > 1 or self.per_machine >= PER_MACHINE:
            return replace(self, machines=2 * self.machines)
        return replace(self, per_machine=2 * self.per_machine)


class Memory(NamedTuple):
    """Bytes of a rank at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss_head: float
    """Logits and what the loss computes from them."""
    buffers: float
    """Gathered layers, buckets, workspaces."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self)


@dataclass(frozen=True)
class Setting:
    """How a step is laid out over ranks."""

    ranks: int
    micro_batches: int
    """Micro-batches of a rank in a step, at most."""
    gpu: bool
    compute_bytes: int = 4
    """Bytes of a weight in computing."""
    whole_gradients: bool = False
    """Whether FSDP2 stores whole gradients (train.keep_whole_gradients)."""


class _Fixed(NamedTuple):
    """The bytes that do not depend on activations."""

    weights: float
    gradients: float
    """When all are computed."""
    optimizer: float
    buffers: float
    prefetch: float = 0.0
    """Added while weights are gathered."""
    reducing: float = 0.0
    """Added while gradients are reduced, at any time of the backward pass."""
    last_reduction: float = 0.0
    """Added at the end of the backward pass."""
    optimizer_step: float = 0.0
    """Added in the optimizer's step."""
    preallocated: bool = False
    """Whether gradients have their memory before they are computed."""


@dataclass(frozen=True)
class Strategy:
    """A way to divide training over ranks."""

    name: str
    option: str
    """Its name for `plugsft launch`, if any."""
    fixed: Callable[[Weights, Setting], _Fixed]
    casts_weights: bool = False
    """Whether the strategy casts weights to bfloat16, instead of autocast."""


def peak_memory(strategy: Strategy, weights: Weights, trace: Trace, setting: Setting) -> Memory:
    """The peak of a rank in a step after the first, which makes the optimizer's states."""
    fixed = strategy.fixed(weights, setting)
    computed = trace.gradients / max(1, trace.gradients[-1])
    if setting.micro_batches > 1 or fixed.preallocated:
        # The first of several micro-batches has allocated all gradients.
        computed = np.ones_like(computed)
    # After the moments of the trace comes the end of the backward pass, or the optimizer's step.
    at_end = max(fixed.reducing, fixed.last_reduction, fixed.optimizer_step)
    buffers = fixed.prefetch + fixed.reducing * (trace.gradients > 0)
    layers, head = trace.activations[[LAYERS, HEAD]]
    changing = np.array(
        [
            [*(fixed.gradients * computed), fixed.gradients],
            [*layers, layers[-1]],
            [*head, head[-1]],
            [*buffers, at_end],
        ]
    )
    gradients, stored, logits, buffer = changing[:, changing.sum(0).argmax()].tolist()
    return Memory(fixed.weights, gradients, fixed.optimizer, stored, logits, fixed.buffers + buffer)


def _process(setting: Setting) -> int:
    return WORKSPACE if setting.gpu else LIBRARIES + GROUP * (setting.ranks > 1)


def _ddp(weights: Weights, setting: Setting) -> _Fixed:
    # DDP's buckets are allocated once, and hold all gradients.
    return _Fixed(
        weights.bytes,
        weights.trained_bytes,
        weights.state_bytes,
        _process(setting),
        preallocated=setting.ranks > 1,
    )


def _fsdp2(weights: Weights, setting: Setting) -> _Fixed:
    share = 1 / setting.ranks
    layer = max((layer.count for layer in weights.layers), default=0)
    trained = max((layer.trained_count for layer in weights.layers), default=weights.trained_count)
    # A layer in computing and in the all-gather; a GPU fetches the next one meanwhile.
    copies = 3 if setting.gpu else 2
    gathered = setting.compute_bytes * (layer * copies + weights.tail.count)
    # A gradient in its computed type, and in the type of the reduction.
    stored = weights.trained_bytes / max(1, weights.trained_count)
    reducing = setting.compute_bytes + stored
    tail = weights.tail.trained_count
    whole = setting.whole_gradients and setting.micro_batches > 1
    return _Fixed(
        weights.bytes * share,
        weights.trained_bytes * (1 if whole else share),
        weights.state_bytes * share,
        gathered + _process(setting),
        # Gradients of embeddings, and of a tied head, are reduced at the end.
        reducing=reducing * max(trained, tail if weights.embeddings.count else 0),
        last_reduction=reducing * max(trained, tail, weights.embeddings.trained_count),
    )


def _zero3(weights: Weights, setting: Setting) -> _Fixed:
    each = setting.compute_bytes
    small = weights.unsharded_count * each
    # The last layers stay gathered for the backward pass, and the next ones are prefetched.
    gathered = min(weights.count, REUSE / 2 + PREFETCH + weights.largest) * each
    # A GPU allocates the whole bucket, a host only what is used.
    bucket = REDUCED * (BUCKET if setting.gpu else min(BUCKET, weights.trained_count))
    # DeepSpeed updates float32 copies of trained weights.
    masters = 4 * weights.trained_count / setting.ranks
    states = weights.state_bytes / setting.ranks
    return _Fixed(
        (weights.count * each - small) / setting.ranks + small,
        REDUCED * weights.trained_count / setting.ranks,
        masters + states,
        gathered + bucket + _process(setting),
        # Gathered weights and sent gradients have a second copy, sorted by ranks.
        prefetch=min(weights.count, PREFETCH) * each,
        reducing=bucket if weights.trained_count > BUCKET else 0.0,
        last_reduction=min(bucket, REDUCED * weights.trained_count),
        optimizer_step=masters - gathered,
        preallocated=True,
    )


SINGLE = Strategy("one process", "", _ddp)
DDP = Strategy("DDP", "ddp", _ddp)
FSDP2 = Strategy("FSDP2", "fsdp2", _fsdp2, casts_weights=True)
ZERO3 = Strategy("ZeRO-3", "zero3", _zero3, casts_weights=True)
