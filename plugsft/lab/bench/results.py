"""The results of a bench: figures of trials, compared."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import RecipeError, reason_of
from ...base.limits import read_json_object
from ...recipe.parse import flatten
from .contenders import ALL, BASELINE, alone, name_without
from .timing import Ratio, machine_line, slowdown, times_as_fast

Figures = dict[str, Any]
"""The metrics of each step of a trial, and its peak memory."""

AFFECTS = "affects results"
FIRST = 3
"""Steps whose losses and gradient norms are compared: later ones accumulate rounding."""
EXACT, ROUNDED = {"loss": 1e-4, "grad_norm": 1e-3}, {"loss": 1e-2, "grad_norm": 5e-2}
"""Relative differences that rounding may make, in float32 and in bfloat16."""
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass
class PluginResult:
    """The effects of a plugin: alone against none, and all against all without it."""

    plugin: str
    steps: bool
    """Whether it can affect a step."""
    alone: Ratio | None = None
    company: Ratio | None = None
    """All plugins against all but this one."""
    host: float | None = None
    """Extra bytes on the host, alone; negative if it saves some."""
    device: float | None = None
    prepared: Ratio | None = None
    again: Ratio | None = None
    """A second preparation, by another run."""
    learned: str = ""
    """How it affects results."""
    failed: list[str] = field(default_factory=list)
    """Contenders that failed."""


class Bench:
    """Reads a bench's report."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        self.report = report
        self.warmup = int(report["settings"]["warmup"])
        self.contenders: dict[str, dict[str, Any]] = report["contenders"]
        self.measured: list[str] = report["measured"]

    def trials(self, part: str) -> list[str]:
        """Return the contenders; of those that share a trial, the first."""
        first: dict[str, str] = {}
        for name, contender in self.contenders.items():
            first.setdefault(contender[part], name)
        return list(first.values()) if self.report[part] else []

    def rounds(self, contender: str, part: str = "rounds") -> list[Figures | None]:
        """Return a contender's figures in each round; None where it failed."""
        key = self.contenders[contender][part]
        all_figures = (trials.get(key) for trials in self.report[part])
        return [figures if figures and not figures["error"] else None for figures in all_figures]

    def figures(self, contender: str, part: str = "rounds") -> list[Figures]:
        """Return a contender's figures in the rounds that succeeded."""
        return [figures for figures in self.rounds(contender, part) if figures]

    def error(self, contender: str, part: str = "rounds") -> str:
        """Return the last line of a contender's error, or an empty string."""
        key = self.contenders[contender][part]
        for trials in self.report[part]:
            figures = trials.get(key)
            if figures and figures["error"]:
                lines = str(figures["error"]).strip().splitlines()
                return "out of memory" if figures.get("out_of_memory") else lines[-1]
        return ""

    def step_ratio(self, one: str, other: str) -> Ratio | None:
        """Return the speed of one contender's steps relative to another's."""
        both = zip(self.rounds(one), self.rounds(other), strict=True)
        pairs = [(a, b) for a, b in both if a and b]
        if not pairs:
            return None
        return times_as_fast(
            *(seconds_per_token(trials, self.warmup) for trials in zip(*pairs, strict=True))
        )

    def preparation_ratio(self, one: str, other: str, time: str) -> Ratio | None:
        """Return the speed of one contender's preparation relative to another's."""
        part = "preparations"
        pairs = zip(self.rounds(one, part), self.rounds(other, part), strict=True)
        ratios = tuple(b[time] / a[time] for a, b in pairs if a and b)
        return Ratio(ratios) if ratios else None

    def lines(self) -> Iterator[PluginResult]:
        """Yield the effects of each measured plugin."""
        for name in self.measured:
            yield self.line(name)

    def line(self, name: str) -> PluginResult:
        """Return the effects of a plugin."""
        line = PluginResult(name, name in self.report["steppers"])
        by_itself, without = alone(name), name_without(name)
        if line.steps:
            line.alone = self.step_ratio(by_itself, BASELINE)
            line.company = self.step_ratio(ALL, without)
            line.host = self.extra_memory(by_itself, BASELINE, "host")
            line.device = self.extra_memory(by_itself, BASELINE, "device")
            line.learned = self.changed_results(by_itself, BASELINE) or self.changed_results(
                ALL, without
            )
            line.failed += self._failed("rounds", by_itself, without)
        if name in self.report["preparers"] and self.report["preparations"]:
            line.prepared = self.preparation_ratio(by_itself, BASELINE, "seconds")
            line.again = self.preparation_ratio(by_itself, BASELINE, "again")
            line.learned = line.learned or self.changed_tokens(by_itself)
            line.failed += self._failed("preparations", by_itself)
        return line

    def _failed(self, part: str, *contenders: str) -> list[str]:
        return [contender for contender in contenders if self.error(contender, part)]

    def extra_memory(self, one: str, other: str, device: str) -> float | None:
        """Return the difference of two contenders' median peak memory."""
        peaks, other_peaks = (
            [figures[device] for figures in self.figures(name) if device in figures]
            for name in (one, other)
        )
        if not peaks or not other_peaks:
            return None
        difference: float = statistics.median(peaks) - statistics.median(other_peaks)
        return difference

    def changed_results(self, one: str, other: str) -> str:
        """Describe how two contenders' results differ, or return an empty string."""
        first = [self.figures(name)[:1] for name in (one, other)]
        return describe_difference(first[0][0], first[1][0]) if all(first) else ""

    def changed_tokens(self, contender: str) -> str:
        """Say so if a contender prepares other tokens than the baseline."""
        first = [self.figures(name, "preparations")[:1] for name in (contender, BASELINE)]
        differs = all(first) and first[0][0]["made"] != first[1][0]["made"]
        return "other tokens" if differs else ""


def seconds_per_token(trials: Sequence[Figures], warmup: int) -> list[float]:
    """Return the seconds per token of each trial of a contender.

    A step has the same examples in every trial; its time is divided by the median over trials. A
    trial counts by the lower quartile of its steps: other load on the machine only slows steps.
    """
    seconds = [trial["seconds"][warmup:] for trial in trials]
    medians = [statistics.median(step) for step in zip(*seconds, strict=True)]
    level = sum(medians) / sum(trials[0]["tokens"][warmup:])
    relative = [
        sorted(took / median for took, median in zip(steps, medians, strict=True))
        for steps in seconds
    ]
    return [level * steps[(len(steps) - 1) // 4] for steps in relative]


def relative_differences(one: Figures, other: Figures) -> dict[str, float]:
    """Return the relative differences of loss and gradient norm in the first steps."""
    return {
        metric: max(
            abs(a - b) / max(abs(b), 1e-12)
            for a, b in zip(one[metric][:FIRST], other[metric][:FIRST], strict=True)
        )
        for metric in EXACT
    }


def describe_difference(one: Figures, other: Figures) -> str:
    """Describe how a trial's results differ from another's, or return an empty string."""
    if one["trained"] != other["trained"]:
        return "other tokens in a step"
    limits = EXACT if one["exact"] and other["exact"] else ROUNDED
    differences = relative_differences(one, other)
    # NaN counts as a difference.
    beyond = [metric for metric in EXACT if not differences[metric] <= limits[metric]]
    return ", ".join(f"{NAMES[metric]} off by {differences[metric]:.1g}" for metric in beyond)


def read_report(path: Path) -> dict[str, Any]:
    """Read the bench.json of an earlier bench."""
    try:
        report = read_json_object(path)
        Bench(report)
    except OSError as error:
        raise RecipeError(f"--against {path}: cannot be read ({reason_of(error)})") from error
    except (ValueError, LookupError, TypeError) as error:
        raise RecipeError(
            f"--against {path}: is not a bench.json of plugsft bench ({type(error).__name__})"
        ) from error
    return report


def ensure_comparable(now: Bench, earlier: Bench) -> None:
    """Refuse benches whose recipes or settings differ; plugins and their options may."""
    old, new = (
        {f"--{name}": value for name, value in bench.report["settings"].items() if name != "rounds"}
        | flatten({k: v for k, v in bench.report["recipe"].items() if k != "plugins"})
        for bench in (earlier, now)
    )
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise RecipeError(
                f"--against: that bench has {name} = {old.get(name)}, and this one "
                f"{new.get(name)}; compare benches of the same recipe and settings"
            )


def regressions(now: Bench, earlier: Bench, tolerance: float) -> Iterator[str]:
    """Yield what is slower, takes more memory or gives other results, beyond a tolerance.

    On another machine, speeds relative to the baseline are compared.
    """
    machines = [machine_line(bench.report["machine"]) for bench in (now, earlier)]
    same = machines[0] == machines[1]
    for name in now.contenders:
        if name not in earlier.contenders or not earlier.figures(name):
            continue
        if why := now.error(name):
            yield f"{name}: failed: {why}"
        if not now.figures(name):
            continue
        factor = slower(now, earlier, name, same)
        if factor > 1 + tolerance:
            relative = "" if same else ", relative to the baseline"
            yield f"{name}: a step takes {factor:.2f} times as long{relative}"
        peak, before = (
            statistics.median(figures["host"] for figures in bench.figures(name))
            for bench in (now, earlier)
        )
        if same and peak > before * (1 + tolerance):
            yield f"{name}: peak memory is {peak / before:.2f} times as high"
        if why := describe_difference(now.figures(name)[0], earlier.figures(name)[0]):
            yield f"{name}: {AFFECTS}: {why}"


def slower(now: Bench, earlier: Bench, name: str, same: bool) -> float:
    """Return the ratio of a step's time to the earlier one; 1 if within noise."""
    if same:
        return slowdown(
            *(seconds_per_token(bench.figures(name), bench.warmup) for bench in (now, earlier))
        )
    ratios = [bench.step_ratio(name, BASELINE) for bench in (earlier, now)]
    return slowdown(*(ratio.rounds for ratio in ratios if ratio)) if all(ratios) else 1.0
