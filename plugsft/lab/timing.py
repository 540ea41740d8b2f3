"""What bench, tune and plan share: rounds, ratios, machines, tables; and the figures of a bench."""

import json
import platform
import random
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ..base.machine import look
from ..output.record import versions

T = TypeVar("T")
FASTER, SLOWER, NOISE = "faster", "slower", "within noise"
ROUNDS = 3
"""Fewer rounds have too little spread to compare a difference with."""
UNKNOWN = "too few rounds: cannot tell"
FLOOR = 1.02
"""Smaller factors count as none, however certain."""
BASELINE, ALL = "baseline", "all on"
FIRST = 3
"""Steps whose losses and gradient norms are compared: later ones accumulate rounding."""
EXACT, ROUNDED = {"loss": 1e-4, "grad_norm": 1e-3}, {"loss": 1e-2, "grad_norm": 5e-2}
"""Relative differences that rounding may make, in float32 and in bfloat16."""
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}
MIB = 2**20
PLUGINS = ["plugin", "alone", "among the others", "memory", "summary"]


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
        return spread(self.rounds, ",.2f", " x")


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
    """The head of a report: date, and the machine and versions that speed depends on."""
    machine = look()
    return {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": processor(),
            "cores": machine.cores,
            "memory_gib": round(machine.memory / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
            "system": machine.system,
        },
        "versions": versions(*packages),
    }


def as_json(report: Mapping[str, Any]) -> str:
    """Format a report; a list of numbers takes one line."""
    text = json.dumps(report, indent=1) + "\n"
    return re.sub(r"\[\n[\s\d.,eE+-]*\]", lambda numbers: " ".join(numbers[0].split()), text)


def processor() -> str:
    """The name of the processor, which Python knows on few systems."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf8")
    names = re.findall(r"^model name\s*: (.+)$", text, re.M)
    return names[0] if names else platform.machine()


Figures = dict[str, Any]
"""The metrics of each step of a trial, and its peak memory."""


def alone(plugin: str) -> str:
    """Name the contender with one plugin and its requirements."""
    return f"{plugin} alone"


def name_without(plugin: str) -> str:
    """Name the contender without one plugin and those that require it."""
    return f"all but {plugin}"


@dataclass
class PluginResult:
    """The effects of a plugin: alone against none, and all against all without it."""

    plugin: str
    alone: Ratio | None
    company: Ratio | None
    """All plugins against all but this one."""
    memory: dict[str, float] = field(default_factory=dict)
    """Host and device -> extra bytes, alone; negative if it saves some."""
    learned: str = ""
    """How it affects results."""
    failed: list[str] = field(default_factory=list)
    """Contenders that failed."""

    def row(self) -> list[str]:
        """Its row of the table."""
        cells = [str(ratio) if ratio else "" for ratio in (self.alone, self.company)]
        extra = [
            f"{'device ' * (device == 'device')}{size / MIB:+,.0f} MiB"
            for device, size in self.memory.items()
        ]
        return [self.plugin, *cells, ", ".join(extra), self.summary()]

    def summary(self) -> str:
        """Summarize the effects in a few words."""
        phrases = [self.alone.word] if self.alone else []
        if self.company and (not self.alone or self.company.word != self.alone.word):
            phrases.append(f"among the others {self.company.word}")
        if self.learned:
            phrases.append(f"affects results ({self.learned})")
        phrases += [f"{contender} failed" for contender in self.failed]
        return "; ".join(dict.fromkeys(phrases)) or NOISE


@dataclass(frozen=True)
class Bench:
    """Reads a bench's report."""

    report: Mapping[str, Any]

    def trials(self, contender: str) -> list[Figures]:
        """A contender's figures in each round, with those of a failure."""
        key = self.report["contenders"][contender]["rounds"]
        return [figures[key] for figures in self.report["rounds"] if key in figures]

    def pairs(self, one: str, other: str) -> list[tuple[Figures, Figures]]:
        """The figures of two contenders in the rounds in which both succeeded."""
        both = zip(self.trials(one), self.trials(other), strict=False)
        return [(a, b) for a, b in both if not a["error"] and not b["error"]]

    def results(self) -> Iterator[PluginResult]:
        """Yield the effects of each measured plugin."""
        warmup = self.report["settings"]["warmup"]
        for name in self.report["measured"]:
            one, rest = alone(name), name_without(name)
            pairs, company = self.pairs(one, BASELINE), self.pairs(ALL, rest)
            result = PluginResult(name, speed_ratio(pairs, warmup), speed_ratio(company, warmup))
            for device in ("host", "device"):
                peaks = [(a[device], b[device]) for a, b in pairs if device in a]
                if peaks:
                    on, off = np.median(peaks, axis=0).tolist()
                    result.memory[device] = on - off
            differences = [describe_difference(*both[0]) for both in (pairs, company) if both]
            result.learned = next(filter(None, differences), "")
            for contender in (one, rest):
                if any(figures["error"] for figures in self.trials(contender)):
                    result.failed.append(contender)
            yield result

    def table(self) -> list[list[str]]:
        """A row for each plugin, below the names of the columns."""
        return [PLUGINS, *(result.row() for result in self.results())]


def speed_ratio(pairs: list[tuple[Figures, Figures]], warmup: int) -> Ratio | None:
    """The speed of one trial relative to another, in each pair.

    A step has the same examples in every trial, so each is compared with itself; the median of
    the steps counts, as other load on the machine slows some of them.
    """
    ratios = []
    for one, other in pairs:
        times = (
            np.array(trial["seconds"][warmup:]) / trial["tokens"][warmup:] for trial in (other, one)
        )
        ratios.append(float(np.median(np.divide(*times))))
    return Ratio(tuple(ratios)) if ratios else None


def describe_difference(one: Figures, other: Figures) -> str:
    """Describe how a trial's results differ from another's, or return an empty string."""
    if one["trained"] != other["trained"]:
        return "other tokens in a step"
    beyond = []
    for metric, limit in (EXACT if one["exact"] and other["exact"] else ROUNDED).items():
        values = zip(one[metric][:FIRST], other[metric][:FIRST], strict=True)
        difference = max(abs(a - b) / max(abs(b), 1e-12) for a, b in values)
        if not difference <= limit:  # NaN counts as a difference
            beyond.append(f"{NAMES[metric]} off by {difference:.1g}")
    return ", ".join(beyond)
