"""Measure in rounds: ratios with confidence, medians with their spread."""

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

from ...base.console import hide_queries
from ...base.machine import look
from ...output.record import PACKAGES

T = TypeVar("T")

FASTER, SLOWER, NOISE = "faster", "slower", "within noise"
UNKNOWN = "one round: cannot tell"
"""The word for a single round, which has no spread to compare a difference with."""
FLOOR = 0.02
"""Smaller differences count as none, however certain."""
SURE = (31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764, 2.718, 2.681, 2.650)
"""Student's t, two-sided 98 %, by degrees of freedom."""


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
        """Faster or slower, if the 98 % interval and the floor exclude equality.

        Load that slows a whole round cancels in its ratio. Load that slows only one of the two
        widens the interval, and so makes neither faster.
        """
        logs = [math.log(ratio) for ratio in self.rounds]
        if len(logs) < 2:
            return UNKNOWN
        mean, margin = statistics.fmean(logs), margin_of_error(logs)
        if abs(mean) <= margin or abs(math.log(self.middle)) < math.log(1 + FLOOR):
            return NOISE
        return FASTER if mean > 0 else SLOWER

    def __str__(self) -> str:
        digits = max(0, 2 - max(0, math.floor(math.log10(self.middle))))
        median, least, most = (
            f"{ratio:,.{digits}f}" for ratio in (self.middle, min(self.rounds), max(self.rounds))
        )
        return f"{median} x ({least} to {most})" if len(self.rounds) > 1 else f"{median} x"


def margin_of_error(*samples: Sequence[float]) -> float:
    """Return half of the 98 % interval of a mean, or of the difference of two."""
    error = math.sqrt(sum(statistics.variance(sample) / len(sample) for sample in samples))
    return SURE[min(min(map(len, samples)) - 1, len(SURE)) - 1] * error


def times_as_fast(one: Sequence[float], other: Sequence[float]) -> Ratio:
    """Compare the seconds of one contender in each round with those of another."""
    return Ratio(tuple(b / a for a, b in zip(one, other, strict=True)))


def slowdown(seconds: Sequence[float], earlier: Sequence[float]) -> float:
    """Return the ratio of seconds from two sessions; 1 if within noise."""
    samples = [[math.log(second) for second in sample] for sample in (seconds, earlier)]
    if min(map(len, samples)) < 2:
        return 1.0
    difference = statistics.fmean(samples[0]) - statistics.fmean(samples[1])
    return math.exp(difference) if abs(difference) > margin_of_error(*samples) else 1.0


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Format a median with minimum and maximum."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


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
