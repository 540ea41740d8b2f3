"""Two runs side by side: what they were told, with what they ran, and what came of them."""

import json
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
from ...recipe.parse import flatten, read
from ...registry.discover import BUNDLED

LEARNED = ("loss", "accuracy", "margin")
"""What is measured in training and is a result; all that is measured in evaluation is one."""
COUNTED = ("rows", "examples", "tokens", "trained_tokens", "pairs")
SPENT = {
    "tokens per second": ("throughput", "tokens_per_second"),
    "trained tokens per second": ("throughput", "trained_tokens_per_second"),
    "seconds a step, median": ("throughput", "step_seconds_median"),
    "tokens that are not padding": ("feeding", "fill"),
    "time waited for data": ("feeding", "waited"),
    "memory at most, GiB": ("memory", "peak_gib"),
}


@dataclass
class Run:
    """A run's output folder, read."""

    name: str
    folder: Path
    facts: dict[str, Any]
    recipe: dict[str, Any] | None
    series: dict[str, Points]
    notes: list[str]
    """What is wrong with it, a line each."""

    @property
    def steps(self) -> int:
        """How many steps its metrics tell of, or else its record."""
        done = table_of(self.facts, "steps").get("done") or 0
        return int(self.series["loss"][-1][0]) if "loss" in self.series else int(done)

    @property
    def state(self) -> str:
        """How it stands, how far it came, and when it began."""
        total = number(table_of(self.facts, "steps").get("total"))
        started = str(self.facts.get("started", "no date")).replace("T", " ")
        of = f" of {total:,}" if total is not None else ""
        return f"{self.facts['status']}, {self.steps:,}{of} steps, started {started}"


@dataclass
class Row:
    """A thing as it is in the one run and in the other, and how much more the other has."""

    name: str
    a: str
    b: str
    change: str = ""


@dataclass
class Section:
    """What differs in one regard."""

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
            f"{folder}: is no run's output: it has no readable run.json; name one that has"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlugsftError(
            f"{folder / 'run.json'}: is damaged: {error}; copy it, or run its recipe, again"
        ) from error
    if not isinstance(facts, dict) or "status" not in facts:
        raise PlugsftError(
            f"{folder / 'run.json'}: was not written by plugsft; name a run's output folder"
        )
    if facts["status"] == "running" and not is_locked(folder):
        facts["status"] = "killed"
    path, metrics = folder / "metrics.jsonl", read_metrics(folder / "metrics.jsonl")
    run, there = Run(name, folder, facts, None, series_of(metrics), []), 0
    try:
        run.recipe = read(folder / "recipe.toml")
    except PlugsftError as error:
        run.notes.append(f"{name}: {error}; recipes are not compared")
    with suppress(OSError):
        there = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    if lost := there - len(metrics):
        said = f"{lost:,} lines" if lost > 1 else "a line"
        run.notes.append(f"{name}: {path}: {said} cannot be read; left out")
    if not run.series:
        run.notes.append(f"{name}: {path}: holds no metrics; there are no curves")
    if facts["status"] != "finished":
        why = f" ({' '.join(str(facts['reason']).split())})" if facts.get("reason") else ""
        run.notes.append(f"{name}: {facts['status']}{why}; results are those of its last step")
    return run


def compare(a: Run, b: Run) -> list[Section]:
    """Return what differs, regard by regard; results stand there whether they do or not."""
    try:
        return list(_sections(a, b))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise PlugsftError(
            f"{a.folder}, {b.folder}: a run.json was not written by plugsft, or not by this version"
        ) from error


def _sections(a: Run, b: Run) -> Iterator[Section]:
    if a.recipe is not None and b.recipe is not None:
        yield Section("recipe", _rows(_keys(a.recipe), _keys(b.recipe), "not set"))
    names = sorted({one["name"] for run in (a, b) for one in run.facts.get("plugins", [])})
    yield Section("plugins", _rows(_plugins(a, names), _plugins(b, names)))
    for title in ("versions", "machine", "model"):
        one, other = (flatten(table_of(run.facts, title)) for run in (a, b))
        yield Section(title, _rows(one, other))
    one, other = ({"weights and compute": run.facts.get("precision")} for run in (a, b))
    yield Section("precision", _rows(one, other))
    for title in ("data", "eval"):
        yield _data(title, table_of(a.facts, title), table_of(b.facts, title))
    yield Section("results", list(_results(a, b)), _losses(a, b))


def _rows(a: Mapping[str, Any], b: Mapping[str, Any], missing: str = "-") -> list[Row]:
    """Return a row for each name whose values differ."""
    names = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
    return [Row(name, *(_text(one.get(name, missing)) for one in (a, b))) for name in names]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    plain = isinstance(value, str) and value.isprintable() and value
    return str(value) if plain else json.dumps(value, default=str)


def _keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's keys as they are written to override them; plugins are told apart."""

    def tables(value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            value = {str(place): one for place, one in enumerate(value)}
        if isinstance(value, dict):
            return {key: tables(one) for key, one in value.items() if one != {}}
        return value

    return flatten(tables({k: v for k, v in recipe.items() if k not in ("output", "plugins")}))


def _plugins(run: Run, names: list[str]) -> dict[str, Any]:
    """Return which plugins a run had, their options, and what they said they did."""
    told: dict[str, Any] = dict.fromkeys(names, "off")
    for one in run.facts.get("plugins", []):
        name = one["name"]
        told |= {**flatten({name: one["options"]}), name: "on"}
        told[f"{name}: verdict"] = one.get("verdict")
        if one.get("origin") != BUNDLED:
            told[f"{name}: from"] = one.get("origin")
    return told


def _data(title: str, a: dict[str, Any], b: dict[str, Any]) -> Section:
    """Compare data sets: the parts of their keys, and what became of their rows."""
    counts = [_measured(name, a.get(name), b.get(name)) for name in COUNTED]
    rows = [row for row in counts if row.a != row.b] + _rows(_words(a), _words(b))
    keys, lines = [table_of(one, "key_parts") for one in (a, b)], list[str]()
    if all(keys):
        lines = [f"tokens of B: {line}" for line in dict.fromkeys(differences(*keys))]
    elif a and b and a.get("key") != b.get("key"):
        lines = ["tokens of B: prepared otherwise; the record does not say how"]
    return Section(title, rows, lines)


def _words(data: dict[str, Any]) -> dict[str, Any]:
    """Return what the record says of data beside the counts."""
    bad, cut = table_of(data, "bad_rows").items(), table_of(data, "truncated")
    lengths = {f"length, {n}": table_of(data, "lengths").get(n) for n in ("median", "p95", "max")}
    return {
        **{f"bad rows, {reason}": one["count"] for reason, one in bad},
        **{f"encoded by {name}": count for name, count in table_of(data, "engines").items()},
        **{name: _figure(number(length)) for name, length in lengths.items()},
        "mask": data.get("mask"),
        "sources": ", ".join(str(one["name"]) for one in data.get("sources", [])) or None,
        "truncated": cut.get("count"),
    }


def _results(a: Run, b: Run) -> Iterator[Row]:
    """Yield what came of the runs, in training, in evaluation, and of the machine."""
    yield _measured("steps", a.steps, b.steps)
    for name in dict.fromkeys([*a.series, *b.series]):
        if name not in LEARNED and not name.startswith("eval_"):
            continue
        one, other = (dict(finite(run.series.get(name, []))) for run in (a, b))
        yield _measured(name, *(points[max(points)] if points else None for points in (one, other)))
        common = max(one.keys() & other.keys(), default=None)
        if common is not None and max(one) != max(other):
            yield _measured(f"{name} at step {common:,}", one[common], other[common])
    for name, (part, key) in SPENT.items():
        yield _measured(name, *(table_of(run.facts, part).get(key) for run in (a, b)))
    yield _measured("seconds", a.facts.get("seconds"), b.facts.get("seconds"))


def _measured(name: str, a: object, b: object) -> Row:
    """Return a row of two numbers, and by how much the second is more than the first."""
    one, other, change = number(a), number(b), ""
    # From below zero to above it, a share says nothing.
    if one and other is not None and one != other and one * other >= 0:
        share = 100 * (other - one) / abs(one)
        change = f"{share:+,.0f}%" if abs(share) >= 10 else f"{share:+.2g}%"
    return Row(name.replace("_", " "), _figure(one), _figure(other), change)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.5g}"


def _losses(a: Run, b: Run) -> list[str]:
    """Say whether the runs had the same losses, or where they part."""
    one, other = (dict(run.series.get("loss", [])) for run in (a, b))
    common = sorted(one.keys() & other.keys())
    for step in common:
        if one[step] != other[step]:
            return [f"losses part at step {step:,}: {_text(one[step])} and {_text(other[step])}"]
    return [f"losses are the same in all {len(common):,} steps that both did"] if common else []
