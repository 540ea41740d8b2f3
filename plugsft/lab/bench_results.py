"""The results of a bench: figures of trials, compared, and their table."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .timing import NOISE, Ratio

Figures = dict[str, Any]
"""The metrics of each step of a trial, and its peak memory."""

BASELINE, ALL = "baseline", "all on"
FIRST = 3
"""Steps whose losses and gradient norms are compared: later ones accumulate rounding."""
EXACT, ROUNDED = {"loss": 1e-4, "grad_norm": 1e-3}, {"loss": 1e-2, "grad_norm": 5e-2}
"""Relative differences that rounding may make, in float32 and in bfloat16."""
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}
MIB = 2**20
PLUGINS = ["plugin", "alone", "among the others", "memory", "summary"]


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
    alone: Ratio | None = None
    company: Ratio | None = None
    """All plugins against all but this one."""
    memory: dict[str, float] = field(default_factory=dict)
    """Host and device -> extra bytes, alone; negative if it saves some."""
    learned: str = ""
    """How it affects results."""
    failed: list[str] = field(default_factory=list)
    """Contenders that failed."""

    def row(self) -> list[str]:
        """Return its row of the table."""
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


class Bench:
    """Reads a bench's report."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        self.report = report
        self.warmup = int(report["settings"]["warmup"])
        self.contenders: dict[str, dict[str, Any]] = report["contenders"]
        self.measured: list[str] = report["measured"]

    def trials(self, contender: str) -> list[Figures]:
        """Return a contender's figures in each round, with those of a failure."""
        key = self.contenders[contender]["rounds"]
        return [figures[key] for figures in self.report["rounds"] if key in figures]

    def figures(self, contender: str) -> list[Figures]:
        """Return a contender's figures in the rounds that succeeded."""
        return [figures for figures in self.trials(contender) if not figures["error"]]

    def error(self, contender: str) -> str:
        """Return the last line of a contender's error, or an empty string."""
        errors = [figures for figures in self.trials(contender) if figures["error"]]
        if errors and errors[0].get("out_of_memory"):
            return "out of memory"
        return str(errors[0]["error"]).strip().splitlines()[-1] if errors else ""

    def pairs(self, one: str, other: str) -> list[tuple[Figures, Figures]]:
        """Return the figures of two contenders in the rounds in which both succeeded."""
        both = zip(self.trials(one), self.trials(other), strict=False)
        return [(a, b) for a, b in both if not a["error"] and not b["error"]]

    def results(self) -> Iterator[PluginResult]:
        """Yield the effects of each measured plugin."""
        for name in self.measured:
            yield self.result(name)

    def result(self, name: str) -> PluginResult:
        """Return the effects of a plugin."""
        result = PluginResult(name)
        pairs = ((alone(name), BASELINE), (ALL, name_without(name)))
        result.alone, result.company = (
            speed_ratio(self.pairs(*pair), self.warmup) for pair in pairs
        )
        for device in ("host", "device"):
            peaks = [self.peak(contender, device) for contender in pairs[0]]
            if all(peaks):
                result.memory[device] = peaks[0] - peaks[1]
        for pair in pairs:
            for a, b in self.pairs(*pair)[:1]:
                result.learned = result.learned or describe_difference(a, b)
        result.failed = [name for name in (alone(name), name_without(name)) if self.error(name)]
        return result

    def peak(self, contender: str, device: str) -> float:
        """Return a contender's median peak memory on host or device; 0 if unknown."""
        peaks = [figures[device] for figures in self.figures(contender) if device in figures]
        return float(statistics.median(peaks)) if peaks else 0.0

    def table(self) -> list[list[str]]:
        """Return a row for each plugin below the names of the columns that have values."""
        rows = [PLUGINS, *(result.row() for result in self.results())]
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        return [list(row) for row in zip(*columns, strict=True)]


def speed_ratio(pairs: list[tuple[Figures, Figures]], warmup: int) -> Ratio | None:
    """Return the speed of one trial relative to another, in each pair.

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
