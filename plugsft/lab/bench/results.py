"""The results of a bench: figures of trials, compared."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import RecipeError
from ...base.limits import read_json_object
from ...recipe.parse import flatten
from .contenders import ALL, BASELINE, alone, name_without
from .timing import Ratio, machine_line, slowdown, times_as_fast

Figures = dict[str, Any]
"""The metrics of each step of a trial, and its peak memory."""

LEARNS = "changes what is learned"
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
        for name, one in self.contenders.items():
            first.setdefault(one[part], name)
        return list(first.values()) if self.report[part] else []

    def rounds(self, contender: str, part: str = "rounds") -> list[Figures | None]:
        """Return a contender's figures in each round; None where it failed."""
        key = self.contenders[contender][part]
        found = (one.get(key) for one in self.report[part])
        return [one if one and not one["error"] else None for one in found]

    def figures(self, contender: str, part: str = "rounds") -> list[Figures]:
        """Return a contender's figures in the rounds that succeeded."""
        return [one for one in self.rounds(contender, part) if one]

    def error(self, contender: str, part: str = "rounds") -> str:
        """Return the last line of a contender's error, or an empty string."""
        key = self.contenders[contender][part]
        for one in self.report[part]:
            if key in one and one[key]["error"]:
                text = str(one[key]["error"]).strip().splitlines()
                return "out of memory" if one[key].get("out_of_memory") else text[-1]
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

    def preparation_ratio(self, one: str, other: str, what: str) -> Ratio | None:
        """Return the speed of one contender's preparation relative to another's."""
        part = "preparations"
        pairs = zip(self.rounds(one, part), self.rounds(other, part), strict=True)
        found = tuple(b[what] / a[what] for a, b in pairs if a and b)
        return Ratio(found) if found else None

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
        return [one for one in contenders if self.error(one, part)]

    def extra_memory(self, one: str, other: str, what: str) -> float | None:
        """Return the difference of two contenders' median peak memory."""
        held = [[now[what] for now in self.figures(name) if what in now] for name in (one, other)]
        return statistics.median(held[0]) - statistics.median(held[1]) if all(held) else None

    def changed_results(self, one: str, other: str) -> str:
        """Describe how two contenders' results differ, or return an empty string."""
        first = [self.figures(name)[:1] for name in (one, other)]
        return describe_difference(first[0][0], first[1][0]) if all(first) else ""

    def changed_tokens(self, one: str) -> str:
        """Tell whether a contender prepares other tokens than the baseline."""
        made = [self.figures(name, "preparations")[:1] for name in (one, BASELINE)]
        differs = all(made) and made[0][0]["made"] != made[1][0]["made"]
        return "other tokens" if differs else ""


def seconds_per_token(trials: Sequence[Figures], warmup: int) -> list[float]:
    """Return the seconds per token of each trial of a contender.

    A step has the same examples in every trial; its time is divided by the median over trials. A
    trial counts by the lower quartile of its steps: other load on the machine only slows steps.
    """
    seconds = [trial["seconds"][warmup:] for trial in trials]
    usual = [statistics.median(step) for step in zip(*seconds, strict=True)]
    level = sum(usual) / sum(trials[0]["tokens"][warmup:])
    shares = [
        sorted(took / most for took, most in zip(some, usual, strict=True)) for some in seconds
    ]
    return [level * some[(len(some) - 1) // 4] for some in shares]


def relative_differences(one: Figures, other: Figures) -> dict[str, float]:
    """Return the relative differences of loss and gradient norm in the first steps."""
    return {
        what: max(
            abs(a - b) / max(abs(b), 1e-12)
            for a, b in zip(one[what][:FIRST], other[what][:FIRST], strict=True)
        )
        for what in EXACT
    }


def describe_difference(one: Figures, other: Figures) -> str:
    """Describe how a trial's results differ from another's, or return an empty string."""
    if one["trained"] != other["trained"]:
        return "other tokens in a step"
    limits = EXACT if one["exact"] and other["exact"] else ROUNDED
    found = relative_differences(one, other)
    # NaN counts as a difference.
    past = [what for what in EXACT if not found[what] <= limits[what]]
    return ", ".join(f"{NAMES[what]} off by {found[what]:.1g}" for what in past)


def read_report(path: Path) -> dict[str, Any]:
    """Read the bench.json of an earlier bench."""
    try:
        report = read_json_object(path)
        Bench(report)
    except OSError as error:
        raise RecipeError(f"--against {path}: cannot be read ({error.strerror})") from error
    except (ValueError, LookupError, TypeError) as error:
        raise RecipeError(
            f"--against {path}: is no bench; give the bench.json of one ({type(error).__name__})"
        ) from error
    return report


def ensure_comparable(now: Bench, earlier: Bench) -> None:
    """Refuse benches whose recipes or settings differ; plugins and their options may."""
    told = []
    for bench in (earlier, now):
        tables = {k: v for k, v in bench.report["recipe"].items() if k != "plugins"}
        told.append(flatten({**tables, "--": bench.report["settings"]}))
    old, new = told
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name) and name != "--.rounds":
            shown = name.replace("--.", "--")
            raise RecipeError(
                f"--against: that bench has {shown} = {old.get(name)}, and this one "
                f"{new.get(name)}; compare benches of the same work"
            )


def regressions(now: Bench, earlier: Bench, tolerance: float) -> Iterator[str]:
    """Yield what is slower, takes more memory or gives other results, beyond a tolerance.

    On another machine, speeds relative to the baseline are compared.
    """
    machines = [machine_line(bench.report["machine"]) for bench in (now, earlier)]
    same = machines[0] == machines[1]
    for name in now.contenders:
        there = name in earlier.contenders and earlier.figures(name)
        if there and (why := now.error(name)):
            yield f"{name}: failed: {why}"
        if not there or not now.figures(name):
            continue
        took = slower(now, earlier, name, same)
        if took > 1 + tolerance:
            beside = "" if same else ", beside the baseline"
            yield f"{name}: a step takes {took:.2f} times as long{beside}"
        held = [statistics.median(one["host"] for one in b.figures(name)) for b in (now, earlier)]
        if same and held[0] > held[1] * (1 + tolerance):
            yield f"{name}: it holds {held[0] / held[1]:.2f} times the memory"
        if why := describe_difference(now.figures(name)[0], earlier.figures(name)[0]):
            yield f"{name}: {LEARNS}: {why}"


def slower(now: Bench, earlier: Bench, name: str, same: bool) -> float:
    """Return the ratio of a step's time to the earlier one; 1 if within noise."""
    if same:
        took = [seconds_per_token(bench.figures(name), bench.warmup) for bench in (now, earlier)]
        return slowdown(*took)
    ratios = [bench.step_ratio(name, BASELINE) for bench in (earlier, now)]
    return slowdown(*(one.rounds for one in ratios if one)) if all(ratios) else 1.0
