"""What a bench has found: its figures, compared and put into words."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import RecipeError
from ...base.limits import read_json_object
from ...recipe.parse import flatten
from .timing import Ratio, machine_line, times_as_fast, times_as_long
from .variants import ALL, BASELINE, all_but, alone

Figures = dict[str, Any]
"""What one trial gave: lists of its steps' metrics, and the bytes it held."""

LEARNS = "changes what is learned"
FIRST = 3
"""Steps whose losses and gradient norms are compared: later ones add up what rounding began."""
EXACT, ROUNDED = {"loss": 1e-4, "grad_norm": 1e-3}, {"loss": 1e-2, "grad_norm": 5e-2}
"""Relative differences that rounding may make, in float32 and in bfloat16."""
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass
class Line:
    """What a plugin brings: alone beside nothing, and in the company of all others."""

    plugin: str
    steps: bool
    """Whether it could touch a step."""
    alone: Ratio | None = None
    company: Ratio | None = None
    """All beside all but this one."""
    host: float | None = None
    """Bytes that it takes alone, on the host; less than nothing where it saves some."""
    device: float | None = None
    prepared: Ratio | None = None
    again: Ratio | None = None
    """Preparing once more, in another run."""
    learned: str = ""
    """In which way it changes what is learned."""
    failed: list[str] = field(default_factory=list)
    """Contenders that did not run."""


class Bench:
    """A bench's report, read."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        self.report = report
        self.warmup = int(report["settings"]["warmup"])
        self.contenders: dict[str, dict[str, Any]] = report["contenders"]
        self.measured: list[str] = report["measured"]

    def trials(self, part: str) -> list[str]:
        """Return the contenders, the first of each that is the same trial as others."""
        first: dict[str, str] = {}
        for name, one in self.contenders.items():
            first.setdefault(one[part], name)
        return list(first.values()) if self.report[part] else []

    def rounds(self, contender: str, part: str = "rounds") -> list[Figures | None]:
        """Return what a contender gave in each round: figures, or None where it failed."""
        key = self.contenders[contender][part]
        found = (one.get(key) for one in self.report[part])
        return [one if one and not one["error"] else None for one in found]

    def figures(self, contender: str, part: str = "rounds") -> list[Figures]:
        """Return what a contender gave in the rounds in which it did not fail."""
        return [one for one in self.rounds(contender, part) if one]

    def error(self, contender: str, part: str = "rounds") -> str:
        """Return what went wrong, its first line."""
        key = self.contenders[contender][part]
        for one in self.report[part]:
            if key in one and one[key]["error"]:
                text = str(one[key]["error"]).strip().splitlines()
                return "out of memory" if one[key].get("out_of_memory") else text[-1]
        return ""

    def faster(self, one: str, other: str) -> Ratio | None:
        """Return how many times as fast one's steps are as another's."""
        both = zip(self.rounds(one), self.rounds(other), strict=True)
        pairs = [(a, b) for a, b in both if a and b]
        if not pairs:
            return None
        return times_as_fast(*(costs(trials, self.warmup) for trials in zip(*pairs, strict=True)))

    def sooner(self, one: str, other: str, what: str) -> Ratio | None:
        """Return how many times as fast one prepares as another."""
        part = "preparations"
        pairs = zip(self.rounds(one, part), self.rounds(other, part), strict=True)
        found = tuple(b[what] / a[what] for a, b in pairs if a and b)
        return Ratio(found) if found else None

    def lines(self) -> Iterator[Line]:
        """Yield what each plugin that was measured brings."""
        for name in self.measured:
            yield self.line(name)

    def line(self, name: str) -> Line:
        """Return what a plugin brings."""
        line = Line(name, name in self.report["steppers"])
        by_itself, without = alone(name), all_but(name)
        if line.steps:
            line.alone = self.faster(by_itself, BASELINE)
            line.company = self.faster(ALL, without)
            line.host = self.more(by_itself, BASELINE, "host")
            line.device = self.more(by_itself, BASELINE, "device")
            line.learned = self.learned(by_itself, BASELINE) or self.learned(ALL, without)
            line.failed += self._failed("rounds", by_itself, without)
        if name in self.report["preparers"] and self.report["preparations"]:
            line.prepared = self.sooner(by_itself, BASELINE, "seconds")
            line.again = self.sooner(by_itself, BASELINE, "again")
            line.learned = line.learned or self.remade(by_itself)
            line.failed += self._failed("preparations", by_itself)
        return line

    def _failed(self, part: str, *contenders: str) -> list[str]:
        return [one for one in contenders if self.error(one, part)]

    def more(self, one: str, other: str, what: str) -> float | None:
        """Return how many bytes more one held at most than another."""
        held = [[now[what] for now in self.figures(name) if what in now] for name in (one, other)]
        return statistics.median(held[0]) - statistics.median(held[1]) if all(held) else None

    def learned(self, one: str, other: str) -> str:
        """Say in which way one learns something else than another, if so."""
        first = [self.figures(name)[:1] for name in (one, other)]
        return differing(first[0][0], first[1][0]) if all(first) else ""

    def remade(self, one: str) -> str:
        """Say whether one prepares other tokens than the baseline."""
        made = [self.figures(name, "preparations")[:1] for name in (one, BASELINE)]
        differs = all(made) and made[0][0]["made"] != made[1][0]["made"]
        return "other tokens" if differs else ""


def costs(trials: Sequence[Figures], warmup: int) -> list[float]:
    """Return the seconds that a token took a contender in each of its trials.

    A step has the same examples in all of them, and is compared with its like: with how long it
    usually took. Of a trial's steps that quarter tells which was least disturbed: what else a
    machine does slows steps down, and as a rule not all of them.
    """
    seconds = [trial["seconds"][warmup:] for trial in trials]
    usual = [statistics.median(step) for step in zip(*seconds, strict=True)]
    level = sum(usual) / sum(trials[0]["tokens"][warmup:])
    shares = [
        sorted(took / most for took, most in zip(some, usual, strict=True)) for some in seconds
    ]
    return [level * some[(len(some) - 1) // 4] for some in shares]


def off(one: Figures, other: Figures) -> dict[str, float]:
    """Return by how much the first steps' losses and gradient norms differ, relatively."""
    return {
        what: max(
            abs(a - b) / max(abs(b), 1e-12)
            for a, b in zip(one[what][:FIRST], other[what][:FIRST], strict=True)
        )
        for what in EXACT
    }


def differing(one: Figures, other: Figures) -> str:
    """Say in which way a trial learned something else than another, if so."""
    if one["trained"] != other["trained"]:
        return "other tokens in a step"
    limits = EXACT if one["exact"] and other["exact"] else ROUNDED
    found = off(one, other)
    # Not "more than": what is no number is off, too.
    past = [what for what in EXACT if not found[what] <= limits[what]]
    return ", ".join(f"{NAMES[what]} off by {found[what]:.1g}" for what in past)


def read_report(path: Path) -> dict[str, Any]:
    """Read an earlier bench's file."""
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


def ensure_alike(now: Bench, earlier: Bench) -> None:
    """Refuse to compare benches of other work; plugins may differ, and their options."""
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


def worse(now: Bench, earlier: Bench, tolerance: float) -> Iterator[str]:
    """Yield what is slower, holds more or learns other than it did, beyond a tolerance.

    Where the machine is another, what is compared is how fast each is beside the baseline.
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
        if why := differing(now.figures(name)[0], earlier.figures(name)[0]):
            yield f"{name}: {LEARNS}: {why}"


def slower(now: Bench, earlier: Bench, name: str, same: bool) -> float:
    """Return how many times as long a step takes as it did; 1 where that is within noise."""
    if same:
        took = [costs(bench.figures(name), bench.warmup) for bench in (now, earlier)]
        return times_as_long(*took)
    ratios = [bench.faster(name, BASELINE) for bench in (earlier, now)]
    return times_as_long(*(one.rounds for one in ratios if one)) if all(ratios) else 1.0
