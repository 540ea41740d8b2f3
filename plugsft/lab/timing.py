"""What bench, tune and plan share: rounds, ratios with their spread, machines, tables."""

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

from ..base.console import hide_queries
from ..base.machine import look
from ..output.record import versions

T = TypeVar("T")

FASTER, SLOWER, NOISE = "faster", "slower", "within noise"
ROUNDS = 3
"""Fewer rounds have too little spread to compare a difference with."""
UNKNOWN = "too few rounds: cannot tell"
FLOOR = 1.02
"""Smaller factors count as none, however certain."""


@dataclass(frozen=True)
class Ratio:
    """The speed of one contender relative to another, in each round that both ran."""

    rounds: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The median."""
        return statistics.median(self.rounds)

    @property
    def word(self) -> str:
        """Faster or slower, if the median is further from 1 than the rounds are apart.

        Load that slows a whole round cancels in its ratio. Load that slows only one of the two
        widens the spread, and so makes neither faster.
        """
        if len(self.rounds) < ROUNDS:
            return UNKNOWN
        factor = max(self.middle, 1 / self.middle)
        if factor <= max(FLOOR, max(self.rounds) / min(self.rounds)):
            return NOISE
        return FASTER if self.middle > 1 else SLOWER

    def __str__(self) -> str:
        digits = max(0, 2 - max(0, math.floor(math.log10(self.middle))))
        return spread(self.rounds, f",.{digits}f", " x")


def times_as_fast(one: Sequence[float], other: Sequence[float]) -> Ratio:
    """Compare the seconds of one contender in each round with those of another."""
    return Ratio(tuple(b / a for a, b in zip(one, other, strict=True)))


def spread(values: Sequence[float], form: str = ".3f", unit: str = "") -> str:
    """Format a median with minimum and maximum."""
    middle = f"{statistics.median(values):{form}}{unit}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):{form}} to {max(values):{form}})"


def in_rounds(rounds: int, contenders: Mapping[str, Callable[[], T]]) -> Iterator[dict[str, T]]:
    """Run each contender once a round, in another order each round; yield the results by name.

    The orders are reproducible, and no contender always follows the same one.
    """
    dice = random.Random(0)
    for _ in range(rounds):
        order = dice.sample([*contenders], len(contenders))
        results = {name: contenders[name]() for name in order}
        yield {name: results[name] for name in contenders}


def head(*packages: str) -> dict[str, Any]:
    """Return the head of a report: date, machine and versions."""
    return {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "versions": versions(*packages),
    }


def as_json(report: Mapping[str, Any]) -> str:
    """Format a report; a list of numbers takes one line."""
    text = hide_queries(json.dumps(report, indent=1) + "\n")
    return re.sub(r"\[\n[\s\d.,eE+-]*\]", lambda numbers: " ".join(numbers[0].split()), text)


def machine_facts() -> dict[str, Any]:
    """Return the facts that a machine's speed depends on."""
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
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine_line(machine: Mapping[str, Any]) -> str:
    """Describe a machine in one line."""
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']:g} GiB, {gpus}"
