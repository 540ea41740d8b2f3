"""What a rank holds at most, by parts, under each way to spread a model."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .meta_model import Weights
from .peak_memory import HEAD, LAYERS, Trace

MIB = 2**20
LIBRARIES, GROUP = 48 * MIB, 32 * MIB
"""On the host: code, threads and tables that the first steps bring along; and a process group."""
WORKSPACE = 64 * MIB
"""Workspace of a GPU's matrix library."""
SUMMED = 4
"""Bytes of a gradient that DeepSpeed reduces and accumulates (float32, see precision.py)."""
BUCKET, PREFETCH, REUSE = 500_000_000, 50_000_000, 1_000_000_000
"""Numbers that DeepSpeed gathers gradients in, fetches ahead, and keeps for another use: its own
defaults, which recipes/accelerate/zero3.yaml leaves as they are."""


class Parts(NamedTuple):
    """Bytes of a rank at the moment when it holds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    """Logits and what the loss makes of them."""
    buffers: float
    """Gathered layers, buckets, workspaces."""

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


@dataclass(frozen=True)
class Strategy:
    """A way to spread a model over ranks."""

    name: str
    file: str
    """Of recipes/accelerate/, if there is one."""
    sharded: bool = False
    """Whether FSDP2 or DeepSpeed casts the weights, instead of autocast."""


ONE = Strategy("one process", "")
DDP = Strategy("DDP", "gpu8.yaml")
FSDP2 = Strategy("FSDP2", "fsdp2.yaml", sharded=True)
ZERO2 = Strategy("ZeRO-2", "", sharded=True)
ZERO3 = Strategy("ZeRO-3", "zero3.yaml", sharded=True)
CPU_DDP = Strategy("DDP", "cpu2.yaml")


@dataclass(frozen=True)
class Setting:
    """Where a model is spread."""

    ranks: int
    micro: int
    """Micro-batches of a rank in a step, at most."""
    gpu: bool
    scale: float = 1.0
    """Factor of activations, measured over forecast, from a probe."""
    computed: int = 4
    """Bytes of a weight in computing."""
    whole: bool = False
    """Whether FSDP2 stores whole gradients (train.keep_whole_gradients)."""


def held(strategy: Strategy, weights: Weights, trace: Trace, at: Setting) -> Parts:
    """Return what a rank holds when it holds most, in a step after the first."""
    lasting = LASTING[strategy.name](weights, at)
    done = trace.grads / max(1, trace.grads[-1])
    if at.micro > 1 or lasting.ready:
        # Of several micro-batches, the first has made them all.
        done = np.ones_like(done)
    grads = lasting.gradients * done
    layers, head = (trace.held[who] * at.scale for who in (LAYERS, HEAD))
    passing = lasting.passing * (trace.grads > 0)
    moment = int((layers + head + grads + passing).argmax())
    peak = Parts(
        lasting.weights,
        float(grads[moment]),
        lasting.optimizer,
        float(layers[moment]),
        float(head[moment]),
        lasting.buffers + lasting.fetching + float(passing[moment]),
    )
    # Or at the end of the backward pass, or in the optimizer's step.
    late = Parts(
        lasting.weights,
        lasting.gradients,
        lasting.optimizer,
        float(layers[-1]),
        float(head[-1]),
        lasting.buffers + max(lasting.passing, lasting.emptying, lasting.updating),
    )
    return max(peak, late, key=lambda one: one.total)


class _Lasting(NamedTuple):
    """What does not depend on the moment."""

    weights: float
    gradients: float
    """When all are there."""
    optimizer: float
    buffers: float
    fetching: float = 0.0
    """More while weights come in."""
    passing: float = 0.0
    """More while gradients travel, at any time of the backward pass."""
    emptying: float = 0.0
    """More at its end."""
    updating: float = 0.0
    """More while the optimizer steps."""
    ready: bool = False
    """Whether gradients have their memory before they are made."""


def _own(at: Setting) -> int:
    return WORKSPACE if at.gpu else LIBRARIES + GROUP * (at.ranks > 1)


def _ddp(weights: Weights, at: Setting) -> _Lasting:
    trained = weights.trained
    # Gradients travel in buckets that have room for all of them.
    buckets = trained if at.ranks > 1 else 0
    return _Lasting(weights.whole, trained, 2 * trained, buckets + _own(at))


def _fsdp2(weights: Weights, at: Setting) -> _Lasting:
    share = 1 / at.ranks
    layer = max((one.count for one in weights.layers), default=0)
    trained = max((one.trained_count for one in weights.layers), default=weights.trained_count)
    # A layer in computing and in the all-gather; a GPU fetches the next one meanwhile.
    gathered = at.computed * (layer * (3 if at.gpu else 2) + weights.tail.count)
    # A gradient in its computed type, and in the type of the reduction.
    passing = at.computed + _stored(weights)
    tail = weights.tail.trained_count
    return _Lasting(
        weights.whole * share,
        weights.trained * (1 if at.whole and at.micro > 1 else share),
        2 * weights.trained * share,
        gathered + _own(at),
        # Gradients of embeddings, and of a tied head, are reduced at the end.
        passing=passing * max(trained, tail if weights.table.count else 0),
        emptying=passing * max(trained, tail, weights.table.trained_count),
    )


def _stored(weights: Weights) -> float:
    """Return the bytes of a trained weight, and of its gradient."""
    return weights.trained / max(1, weights.trained_count)


def _masters(weights: Weights, ranks: int) -> float:
    """Return the bytes of float32 copies of trained weights, which DeepSpeed updates."""
    return 4 * weights.trained_count / ranks


def _bucket(weights: Weights, at: Setting) -> float:
    """Return the bytes of the bucket for gradients: a GPU sets it aside, a host fills it."""
    return SUMMED * (BUCKET if at.gpu else min(BUCKET, weights.trained_count))


def _zero3(weights: Weights, at: Setting) -> _Lasting:
    each = at.computed
    small = weights.persistent * each
    # The last layers stay gathered for the backward pass, and the next ones are fetched.
    live = min(weights.count, REUSE / 2 + PREFETCH + weights.largest) * each
    bucket = _bucket(weights, at)
    own = (weights.count * each - small) / at.ranks + small
    return _Lasting(
        own,
        SUMMED * weights.trained_count / at.ranks,
        3 * _masters(weights, at.ranks),
        live + bucket + _own(at),
        # What comes in, or goes out, is there a second time: sorted by ranks.
        fetching=min(weights.count, PREFETCH) * each,
        passing=bucket if weights.trained_count > BUCKET else 0.0,
        emptying=min(bucket, SUMMED * weights.trained_count),
        updating=_masters(weights, at.ranks) - live,
        ready=True,
    )


def _zero2(weights: Weights, at: Setting) -> _Lasting:
    bucket = _bucket(weights, at)
    return _Lasting(
        weights.count * at.computed,
        SUMMED * weights.trained_count / at.ranks,
        3 * _masters(weights, at.ranks),
        bucket + _own(at),
        passing=bucket if weights.trained_count > BUCKET else 0.0,
        emptying=min(bucket, SUMMED * weights.trained_count),
        updating=_masters(weights, at.ranks),
    )


LASTING = {
    "one process": _ddp,
    "DDP": _ddp,
    "FSDP2": _fsdp2,
    "ZeRO-2": _zero2,
    "ZeRO-3": _zero3,
}
