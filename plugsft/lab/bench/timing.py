"""What every bench measures with: rounds in turn, medians with their spread, and plain words."""

import importlib.metadata
import json
import math
import platform
import random
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...base.machine import look
from ...output.record import PACKAGES

T = TypeVar("T")

FASTER, SLOWER, NOISE = "faster", "slower", "within noise"
FLOOR = 0.02
"""What is less than this apart is the same, however sure."""
SURE = (31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764, 2.718, 2.681, 2.650)
"""Student's t for 98 %, on both sides, by the number of rounds less one."""


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one is as another, in each round that both took part in."""

    rounds: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The median."""
        return statistics.median(self.rounds)

    @property
    def word(self) -> str:
        """Faster or slower where the rounds are sure of it, and it is more than nothing.

        What slows a whole round down is in none of its ratios. A round that was disturbed for one
        of the two only widens the interval, and so makes neither faster or slower.
        """
        logs = [math.log(one) for one in self.rounds]
        if len(logs) < 2:
            return NOISE
        mean, sure = statistics.fmean(logs), reach(logs)
        if abs(mean) <= sure or abs(math.log(self.middle)) < math.log(1 + FLOOR):
            return NOISE
        return FASTER if mean > 0 else SLOWER

    def __str__(self) -> str:
        digits = max(0, 2 - max(0, math.floor(math.log10(self.middle))))
        middle, *ends = (
            f"{one:,.{digits}f}" for one in (self.middle, min(self.rounds), max(self.rounds))
        )
        return f"{middle} x ({ends[0]} to {ends[1]})" if len(self.rounds) > 1 else f"{middle} x"

    @property
    def said(self) -> str:
        """The whole of it, for a line."""
        return f"{self} as fast, {self.word}"


def reach(*samples: Sequence[float]) -> float:
    """Return how far a mean, or the difference of two, may be off: half of the 98 % interval."""
    error = math.sqrt(sum(statistics.variance(some) / len(some) for some in samples))
    return SURE[min(min(map(len, samples)) - 1, len(SURE)) - 1] * error


def times_as_fast(one: Sequence[float], other: Sequence[float]) -> Ratio:
    """Compare the seconds that one took in each round with those of another."""
    return Ratio(tuple(b / a for a, b in zip(one, other, strict=True)))


def times_as_long(some: Sequence[float], others: Sequence[float]) -> float:
    """Compare seconds that were taken at different times; 1 where they are apart by noise."""
    logs = [[math.log(one) for one in seconds] for seconds in (some, others)]
    if min(map(len, logs)) < 2:
        return 1.0
    more = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    return math.exp(more) if abs(more) > reach(*logs) else 1.0


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Write a median with the least and the most."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} ({least:{form}} to {most:{form}})"


def in_rounds(rounds: int, contenders: Mapping[str, Callable[[], T]]) -> Iterator[dict[str, T]]:
    """Let each contender run once a round, each time in another order; yield what they gave.

    The orders are the same each time: no contender always follows the same one.
    """
    dice = random.Random(0)
    for _ in range(rounds):
        made = {name: contenders[name]() for name in dice.sample([*contenders], len(contenders))}
        yield {name: made[name] for name in contenders}


def head(*packages: str) -> dict[str, Any]:
    """Return what every result begins with: when, where, and with which versions."""
    names = (*PACKAGES, *packages)
    return {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in dict.fromkeys(names)},
        },
    }


def as_json(report: Mapping[str, Any]) -> str:
    """Write a result, with lists of numbers in a line each."""
    text = json.dumps(report, indent=1) + "\n"
    return re.sub(r"\[\n[\s\d.,eE+-]*\]", lambda found: " ".join(found[0].split()), text)


def machine_facts() -> dict[str, Any]:
    """Return what a machine's speed depends on."""
    machine = look()
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {
        "cpu": processor(),
        "cores": machine.cores,
        "memory_gib": round(machine.memory / 2**30, 1),
        "gpus": gpus,
        "system": machine.system,
    }


def processor() -> str:
    """Name the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine_line(machine: Mapping[str, Any]) -> str:
    """Name a machine in a line."""
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']:g} GiB, {gpus}"
