"""Compare two runs: recipes, versions, machines, data and results."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import PlugsftError
from ...base.limits import parse_json, read_text
from ...data.cache_key import differences
from ...output.folder import is_locked, suggest_name
from ...output.report import Points, finite, number, read_metrics, series_of, table_of
from ...recipe.parse import flatten
from ...recipe.read import read
from ...registry.discover import BUNDLED

RESULTS = ("loss", "accuracy", "margin")
"""Training metrics that are results; every evaluation metric is one."""
LENGTHS = {"median": "median", "95th percentile": "p95", "longest": "max"}
"""Names of figures about lengths, and their keys in run.json."""
COUNTS = ("rows", "examples", "tokens", "trained_tokens", "pairs")
COSTS = {
    "tokens per second": ("throughput", "tokens_per_second"),
    "trained tokens per second": ("throughput", "trained_tokens_per_second"),
    "seconds a step, median": ("throughput", "step_seconds_median"),
    "padding": ("batches", "padding"),
    "time waited for data": ("batches", "data_wait_share"),
    "peak memory, GiB": ("memory", "peak_gib"),
}

ROUNDING = 1e-6
"""A relative difference that rounding explains."""
TIME = re.compile(r"\b[\d.,]+ (ms|s|min)\b")


@dataclass
class Run:
    """A run's output folder, read."""

    name: str
    folder: Path
    facts: dict[str, Any]
    recipe: dict[str, Any] | None
    series: dict[str, Points]
    notes: list[str]
    """Problems of its files, a line each."""

    @property
    def steps(self) -> int:
        """The steps in its metrics, or else in its record."""
        done = table_of(self.facts, "steps").get("done") or 0
        return int(self.series["loss"][-1][0]) if "loss" in self.series else int(done)

    @property
    def state(self) -> str:
        """Its status, steps and start, in words."""
        total = number(table_of(self.facts, "steps").get("total"))
        started = str(self.facts.get("started", "no date")).replace("T", " ")
        of_total = f" of {total:,}" if total is not None else ""
        return f"{self.facts['status']}, {self.steps:,}{of_total} steps, started {started}"


@dataclass
class Row:
    """A value of each run, and the relative change from A to B."""

    name: str
    a: str
    b: str
    change: str = ""


@dataclass
class Section:
    """The differences in one part of the runs."""

    title: str
    rows: list[Row]
    lines: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.rows and not self.lines


def read_run(name: str, folder: Path) -> Run:
    """Read a run's folder; report damaged files other than run.json, and leave them out."""
    if not folder.is_dir():
        why = "is a file" if folder.exists() else f"no such folder{suggest_name(folder)}"
        raise PlugsftError(f"{folder}: {why}; name a run's output folder")
    try:
        facts = parse_json(read_text(folder / "run.json"))
    except OSError as error:
        raise PlugsftError(
            f"{folder}: is no run's output: it has no readable run.json; name a run's output folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlugsftError(
            f"{folder / 'run.json'}: is damaged: {error}; copy it again, or run its recipe again"
        ) from error
    if not isinstance(facts, dict) or "status" not in facts:
        raise PlugsftError(
            f"{folder / 'run.json'}: was not written by plugsft; name a run's output folder"
        )
    if facts["status"] == "running" and not is_locked(folder):
        facts["status"] = "killed"
    path, metrics = folder / "metrics.jsonl", read_metrics(folder / "metrics.jsonl")
    run, count = Run(name, folder, facts, None, series_of(metrics), []), 0
    try:
        run.recipe = read(folder / "recipe.toml")
    except PlugsftError as error:
        run.notes.append(f"{name}: {error}; recipes are not compared")
    with suppress(OSError):
        count = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    if unreadable := count - len(metrics):
        lines = f"{unreadable:,} lines" if unreadable > 1 else "a line"
        run.notes.append(f"{name}: {path}: {lines} cannot be read; skipped")
    if not run.series:
        run.notes.append(f"{name}: {path}: holds no metrics, so it has no curves")
    if facts["status"] != "completed":
        why = f" ({' '.join(str(facts['reason']).split())})" if facts.get("reason") else ""
        run.notes.append(f"{name}: {facts['status']}{why}; results are those of its last step")
    return run


def compare(a: Run, b: Run) -> list[Section]:
    """Return the differences, and the results even if they are the same."""
    try:
        return list(_sections(a, b))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise PlugsftError(
            f"{a.folder}, {b.folder}: a run.json was not written by plugsft, or not by this version"
        ) from error


def _sections(a: Run, b: Run) -> Iterator[Section]:
    if a.recipe is not None and b.recipe is not None:
        yield Section("recipe", _rows(_keys(a.recipe), _keys(b.recipe), "not set"))
    names = sorted({entry["name"] for run in (a, b) for entry in run.facts.get("plugins", [])})
    rows = _rows(_plugins(a, names), _plugins(b, names))
    yield Section("plugins", [row for row in rows if not _only_times_differ(row)])
    for title in ("versions", "machine", "model"):
        facts_a, facts_b = (flatten(table_of(run.facts, title)) for run in (a, b))
        yield Section(title, _rows(facts_a, facts_b))
    facts_a, facts_b = ({"weights and compute": run.facts.get("precision")} for run in (a, b))
    yield Section("precision", _rows(facts_a, facts_b))
    for title in ("data", "eval"):
        yield _data(title, table_of(a.facts, title), table_of(b.facts, title))
    yield Section("results", list(_results(a, b)), _losses(a, b))


def _rows(a: Mapping[str, Any], b: Mapping[str, Any], missing: str = "-") -> list[Row]:
    """Return a row for each name whose values differ."""
    names = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
    return [Row(name, _text(a.get(name, missing)), _text(b.get(name, missing))) for name in names]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    plain = isinstance(value, str) and value.isprintable() and value
    return str(value) if plain else json.dumps(value, default=str)


def _keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's keys as overrides write them; plugins have a section of their own."""

    def tables(value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict):
            return {key: tables(item) for key, item in value.items() if item != {}}
        return value

    return flatten(tables({k: v for k, v in recipe.items() if k not in ("output", "plugins")}))


def _plugins(run: Run, names: list[str]) -> dict[str, Any]:
    """Return the plugins of a run, with their options, summaries and origins."""
    values: dict[str, Any] = dict.fromkeys(names, "off")
    for entry in run.facts.get("plugins", []):
        name = entry["name"]
        values |= {**flatten({name: entry["options"]}), name: "on"}
        values[f"{name}: summary"] = entry.get("summary")
        if entry.get("origin") != BUNDLED:
            values[f"{name}: from"] = entry.get("origin")
    return values


def _only_times_differ(row: Row) -> bool:
    """Tell whether two summaries differ only in seconds, which no two runs share."""
    return row.name.endswith(": summary") and TIME.sub("", row.a) == TIME.sub("", row.b)


def _data(title: str, a: dict[str, Any], b: dict[str, Any]) -> Section:
    """Compare data sets: the parts of their keys, and the counts of their rows."""
    counts = [_numbers(name, a.get(name), b.get(name)) for name in COUNTS]
    rows = [row for row in counts if row.a != row.b] + _rows(_details(a), _details(b))
    keys, lines = [table_of(data, "key_parts") for data in (a, b)], list[str]()
    if all(keys):
        lines = [f"tokens of B: {line}" for line in dict.fromkeys(differences(*keys))]
    elif a and b and a.get("key") != b.get("key"):
        lines = ["tokens of B: prepared differently; the record does not say how"]
    return Section(title, rows, lines)


def _details(data: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about data other than the counts."""
    bad, cut = table_of(data, "bad_rows").items(), table_of(data, "truncated")
    known = table_of(data, "lengths")
    lengths = {f"length, {name}": known.get(key) for name, key in LENGTHS.items()}
    return {
        **{f"bad rows, {reason}": rows["count"] for reason, rows in bad},
        **{f"encoded by {name}": count for name, count in table_of(data, "engines").items()},
        **{name: _figure(number(length)) for name, length in lengths.items()},
        "mask": data.get("mask"),
        "sources": ", ".join(str(source["name"]) for source in data.get("sources", [])) or None,
        "truncated": cut.get("count"),
    }


def _results(a: Run, b: Run) -> Iterator[Row]:
    """Yield the results and the costs of the runs."""
    yield _numbers("steps", a.steps, b.steps)
    for name in dict.fromkeys([*a.series, *b.series]):
        if name not in RESULTS and not name.startswith("eval_"):
            continue
        points_a, points_b = (dict(finite(run.series.get(name, []))) for run in (a, b))
        yield _numbers(
            name, *(points[max(points)] if points else None for points in (points_a, points_b))
        )
        common = max(points_a.keys() & points_b.keys(), default=None)
        if common is not None and max(points_a) != max(points_b):
            yield _numbers(f"{name} at step {common:,}", points_a[common], points_b[common])
    for name, (part, key) in COSTS.items():
        yield _numbers(name, *(table_of(run.facts, part).get(key) for run in (a, b)))
    yield _numbers("seconds", a.facts.get("seconds"), b.facts.get("seconds"))


def _numbers(name: str, a: object, b: object) -> Row:
    """Return a row of two numbers, and the relative change."""
    first, second, change = number(a), number(b), ""
    # A relative change across zero has no meaning.
    if first and second is not None and first != second and first * second >= 0:
        percent = 100 * (second - first) / abs(first)
        change = f"{percent:+,.0f}%" if abs(percent) >= 10 else f"{percent:+.2g}%"
        if abs(percent) < 100 * ROUNDING:
            change = "rounding"
    return Row(name.replace("_", " "), _figure(first), _figure(second), change)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.5g}"


def _are_close(first: float | None, second: float | None) -> bool:
    """Tell whether two losses differ by rounding at most; None is not finite."""
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=ROUNDING)


def _losses(a: Run, b: Run) -> list[str]:
    """Say whether the losses are the same, or at which step they diverge."""
    losses_a, losses_b = (dict(run.series.get("loss", [])) for run in (a, b))
    common = sorted(losses_a.keys() & losses_b.keys())
    pairs = [(losses_a[step], losses_b[step]) for step in common]
    for step, (first, second) in zip(common, pairs, strict=True):
        if not _are_close(first, second):
            return [f"losses diverge at step {step:,}: {_text(first)} and {_text(second)}"]
    same = f"losses are the same in all {len(common):,} common steps"
    if any(first != second for first, second in pairs):
        same += f", but for rounding (relative differences below {ROUNDING:g})"
    return [same] if common else []
