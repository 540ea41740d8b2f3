"""How long a step takes: a simple model of computing, memory and links, with its shares stated."""

import math
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...base.machine import look
from ...model.flops import PEAKS, peak_flops
from .meta_model import Weights
from .peak_memory import Trace
from .strategies import Setting, Strategy
from .workload import Workload

PRODUCTS, STREAM, LINKS, HIDDEN = 0.5, 0.6, 0.8, 0.8
"""Shares that are reached: of the peak in products of matrices, of memory's bandwidth, of links';
and the share of computing behind which traffic can hide."""
LAUNCH, HOP = 6e-6, 5e-6
"""Seconds that an operation takes at least on a GPU, and a message from one rank to the next."""
BUCKET = 25 * 2**20
"""Bytes of gradients that DDP sends at a time."""
GB = 10**9
MACHINE = 8
"""Default number of GPUs of a machine."""


@dataclass(frozen=True)
class Chip:
    """What a rank computes with."""

    name: str
    half: float
    """FLOP/s of dense products in bfloat16."""
    single: float
    """In float32, as torch computes it unless told otherwise."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes per second from memory."""
    link: float
    """Bytes per second that it sends to others of its machine."""
    network: float
    """Bytes per second that it sends to other machines: its share of their network cards."""
    gpu: bool = True


def _gpu(name: str, single: float, *others: float) -> Chip:
    half = PEAKS[name.split("-")[0]]
    memory, bandwidth, link, network = (one * GB for one in others)
    return Chip(name, half * 1e12, single * 1e12, memory, bandwidth, link, network)


# TFLOP/s in float32, GB, GB/s. From the data sheets of NVIDIA (H100 and A100 as SXM; NVLink's both
# directions halved) and AMD; the network is that of DGX H100 and B200 (400 Gbit/s a GPU), DGX A100
# (200), and 100 Gbit/s a GPU where cards stand in servers of other makers.
CHIPS = {
    one.name: one
    for one in (
        _gpu("B200", 75, 180, 8000, 900, 50),
        _gpu("H200", 67, 141, 4800, 450, 50),
        _gpu("H100", 67, 80, 3350, 450, 50),
        _gpu("A100", 19.5, 80, 2039, 300, 25),
        _gpu("A100-40GB", 19.5, 40, 1555, 300, 25),
        _gpu("MI300X", 163, 192, 5300, 448, 50),
        _gpu("L40S", 91.6, 48, 864, 32, 12.5),
        _gpu("4090", 82.6, 24, 1008, 16, 12.5),
    )
}


class Took(NamedTuple):
    """Seconds of a step, by what they are for."""

    computing: float
    traffic: float
    """Of it, what is not hidden behind computing."""
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


@dataclass(frozen=True)
class Cluster:
    """Chips, and how many."""

    chip: Chip
    machines: int
    each: int
    speed: float = 1.0
    """How fast a probe has found computing to be, for one that is forecast."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.machines * self.each

    def doubled(self) -> "Cluster":
        """Return twice as many: in the machine, or where it is full, in twice as many machines."""
        full = self.machines > 1 or self.each >= MACHINE
        machines, each = (2, 1) if full else (1, 2)
        return replace(self, machines=machines * self.machines, each=each * self.each)


def here(half: bool) -> Chip:
    """Return what this machine has: a GPU by its name, or what is measured of it in a second."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    name = torch.cuda.get_device_name() if gpu else "CPU"
    known = [chip for key, chip in CHIPS.items() if key in name.replace(" ", "-")]
    total = torch.cuda.get_device_properties().total_memory if gpu else look().memory
    if known:
        return replace(min(known, key=lambda one: abs(one.memory - total)), memory=total)
    rate = peak_flops(device, half)[0]
    flow = _flow(device)
    # What was measured is what is reached.
    rate, flow = rate / PRODUCTS, flow / STREAM
    return Chip(name, rate, rate, total, flow, flow / 8, 1.25 * GB, gpu)


def _flow(device: torch.device) -> float:
    """Return the bytes per second that memory gives and takes."""
    one = torch.zeros(2**26 if device.type == "cuda" else 2**23, device=device)
    seconds = math.inf
    for _ in range(4):
        started = time.perf_counter()
        (one + 1)[-1].item()
        seconds = min(seconds, time.perf_counter() - started)
    return 2 * one.numel() * 4 / seconds


def took(
    strategy: Strategy,
    weights: Weights,
    trace: Trace,
    load: Workload,
    cluster: Cluster,
    at: Setting,
) -> Took:
    """Return how long a step takes: as long as its busiest rank."""
    chip = cluster.chip
    # Ranks on a processor share it.
    share = 1 if chip.gpu else cluster.each
    rate = (chip.half if at.computed == 2 else chip.single) * PRODUCTS / share
    flow = chip.bandwidth * STREAM / share
    places, squares = load.slots / load.seen[0], load.squares / load.seen[1]
    busy = (trace.products / rate + trace.moved / flow) * places + trace.attention / rate * squares
    if chip.gpu:
        busy = busy.clip(min=LAUNCH * trace.calls * load.parts[:, None])
    computing = float(busy.max(1).mean()) / cluster.speed
    parts = float(load.parts.mean())
    traffic, window = _traffic(strategy, weights, cluster, parts, computing, at)
    shards = cluster.ranks if strategy.name in ("FSDP2", "ZeRO-2", "ZeRO-3") else 1
    # Weights and two states are read and written, gradients read, and their norm taken before.
    optimizer = 8 * weights.trained / shards / flow
    return Took(computing, max(0.0, traffic - HIDDEN * window), optimizer)


def _traffic(
    strategy: Strategy,
    weights: Weights,
    cluster: Cluster,
    parts: float,
    computing: float,
    at: Setting,
) -> tuple[float, float]:
    """Return the seconds of a step's traffic, and those of computing that it may hide behind."""
    if cluster.ranks == 1:
        return 0.0, 0.0
    # Weights are gathered in the computing type, gradients reduced in the weights' type.
    whole, trained = weights.count * at.computed, weights.trained
    units = len(weights.layers) + 2
    # The gradients' way begins with the last micro-batch's backward pass.
    last = computing / parts * 2 / 3
    if strategy.name == "FSDP2":
        reduced = 1 if at.whole else parts
        calls, sent = units * (2 * parts + reduced), 2 * parts * whole + reduced * trained
        return _sending(sent, calls, cluster), computing
    if strategy.name == "ZeRO-3":
        calls, sent = units * 3 * parts, parts * (2 * whole + trained)
        return _sending(sent, calls, cluster), computing
    if strategy.name == "ZeRO-2":
        # Updated weights are gathered when nothing is left to hide behind.
        gathering = _sending(weights.trained_count * at.computed, units, cluster)
        return _sending(parts * trained, units * parts, cluster) + gathering, last
    return _sending(2 * trained, trained / BUCKET, cluster), last


def _sending(size: float, calls: float, cluster: Cluster) -> float:
    """Return the seconds in which all ranks gather, or reduce, so many bytes."""
    chip, ranks = cluster.chip, cluster.ranks
    # A ring goes through each machine once: all its network cards work for it.
    link = chip.link if cluster.machines == 1 else min(chip.link, chip.network * cluster.each)
    # What is small goes around in a machine, and up a tree of machines.
    hops = cluster.each - 1 + 2 * math.log2(cluster.machines)
    return size * (ranks - 1) / ranks / (link * LINKS) + calls * hops * HOP
