"""Results of a run in a few lines, and `plugsft diff`: the differences of two runs."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from ..base.console import out, print_table, say
from ..base.errors import PlugsftError
from ..recipe.parse import differences, flatten
from ..recipe.read import read
from ..registry.discover import BUNDLED
from .folder import how_to_continue, read_run
from .run_record import Data, RunRecord, finite

WIDE = 36
"""Most characters of a column; a longer value has a line of its own."""
RESULTS = ("loss", "accuracy", "margin")
"""Training metrics that are results; every evaluation metric is one."""
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


def show_run(folder: Path) -> None:
    """Print the results of a run."""
    for name, text in summarize(folder):
        out.print(Text.assemble((f"{name:<9}", "bold"), text))


def summarize(folder: Path) -> list[tuple[str, str]]:
    """Return the results of a run: names and texts."""
    return [(name, text) for name, text in _summary(read_run(folder)) if text]


def _summary(run: RunRecord) -> Iterator[tuple[str, str]]:
    folder, steps, machine, model = run.folder, run.steps, run.machine, run.model
    reason = f"continue with {how_to_continue(folder)}" if run.status == "killed" else run.reason
    yield "status", run.status + (f": {reason}" if reason else "")
    yield "started", run.started
    if steps.total:
        yield "steps", f"{steps.done:,} of {steps.total:,}, {steps.per_epoch:,} an epoch"
    for name, _, text in run.figures:
        yield name, text
    yield "machine", ", ".join(filter(None, (machine.host, machine.device, machine.launcher)))
    if model.type:
        count = f"{model.parameters:,} parameters, {model.dtype}"
        yield "model", f"{model.type} ({model.source}), {count}"
    for name, data in (("data", run.data), ("eval", run.eval)):
        if data:
            yield name, f"{', '.join(source.name for source in data.sources)}: {describe(data)}"
            yield "mask", data.mask or ""
    for plugin in run.plugins:
        yield "plugin", f"{plugin.name}: {plugin.summary}"
    for warning in run.warnings:
        yield "warning", warning
    if (folder / "report.html").is_file():
        yield "report", str(folder / "report.html")
    if (folder / "model").is_dir():
        yield "talk", f"plugsft chat {shlex.quote(str(folder))}"


def describe(data: Data) -> str:
    """Return the counts of a data set in words."""
    share = data.trained_tokens / max(1, data.tokens)
    bad = sum(rows.count for rows in data.bad_rows.values())
    return (
        f"{data.examples:,} examples, {data.tokens:,} tokens, {share:.0%} trained, {bad:,} bad "
        f"rows, {data.truncated.count:,} truncated"
    )


class Row(NamedTuple):
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


def diff(first: Path, second: Path) -> None:
    """Print the differences of two runs."""
    runs = read_run(first), read_run(second)
    if first.samefile(second):
        raise PlugsftError(f"{second}: is the same run; name another run's output folder")
    notes = list[str]()
    sections = list(compare(*runs, notes))
    for name, run in zip("AB", runs, strict=True):
        steps = f"{run.steps.done:,} of {run.steps.total:,} steps"
        state = f"{run.status}, {steps}, started {run.started.replace('T', ' ')}"
        say(f"{name}  {run.folder}: {state}")
        notes += problems(name, run)
    for note in notes:
        say(f"note: {note}")
    for section in sections:
        if not section.same:
            show(section)
    if same := [section.title for section in sections if section.same]:
        say(f"\nthe same: {', '.join(same)}")


def show(section: Section) -> None:
    """Print two values in a line, then long ones below each other."""
    long = [row for row in section.rows if max(len(row.a), len(row.b)) > WIDE]
    say("")
    print_table([Row(section.title, "A", "B"), *(row for row in section.rows if row not in long)])
    for row in long:
        say(f"{row.name}  A: {row.a}\n{'':<{len(row.name)}}  B: {row.b}")
    for line in section.lines:
        say(line)


def problems(name: str, run: RunRecord) -> Iterator[str]:
    """Say what is missing or damaged in a run's folder."""
    path, count = run.folder / "metrics.jsonl", 0
    with suppress(OSError):
        count = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    if unreadable := count - len(run.metrics):
        lines = f"{unreadable:,} lines" if unreadable > 1 else "a line"
        yield f"{name}: {path}: {lines} cannot be read; skipped"
    if not run.series:
        yield f"{name}: {path}: holds no metrics, so it has no curves"
    if run.status != "completed":
        why = f" ({' '.join(run.reason.split())})" if run.reason else ""
        yield f"{name}: {run.status}{why}; results are those of its last step"


def compare(a: RunRecord, b: RunRecord, notes: list[str]) -> Iterator[Section]:
    """Yield the differences, and the results even if they are the same."""
    try:
        keys = recipe_keys(a.folder), recipe_keys(b.folder)
        yield Section("recipe", rows(*keys, missing="not set"))
    except PlugsftError as error:
        notes.append(f"{error}; recipes are not compared")
    names = sorted({plugin.name for run in (a, b) for plugin in run.plugins})
    differing = rows(plugins(a, names), plugins(b, names))
    yield Section("plugins", [row for row in differing if not only_times_differ(row)])
    for title in ("versions", "machine", "model"):
        tables = (flatten(run.facts.get(title) or {}) for run in (a, b))
        yield Section(title, rows(*tables))
    precisions = ({"weights and compute": run.precision} for run in (a, b))
    yield Section("precision", rows(*precisions))
    yield data("data", a.data, b.data)
    yield data("eval", a.eval, b.eval)
    yield Section("results", list(results(a, b)), losses(a, b))


def rows(*sides: Mapping[str, Any], missing: str = "-") -> list[Row]:
    """Return a row for each name whose values differ."""
    a, b = sides
    names = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
    return [Row(name, text(a.get(name, missing)), text(b.get(name, missing))) for name in names]


def text(value: Any) -> str:
    """Return a value as a recipe writes it, and plain words without quotes."""
    if value is None:
        return "-"
    plain = isinstance(value, str) and value.isprintable() and value
    return str(value) if plain else json.dumps(value, default=str)


def recipe_keys(folder: Path) -> dict[str, Any]:
    """Return a recipe's keys as overrides write them; plugins have a section of their own."""
    recipe = read(folder / "recipe.toml")
    return flatten({k: v for k, v in recipe.items() if k not in ("output", "plugins")})


def plugins(run: RunRecord, names: list[str]) -> dict[str, Any]:
    """Return the plugins of a run, with their options, summaries and origins."""
    values: dict[str, Any] = dict.fromkeys(names, "off")
    for plugin in run.plugins:
        name = plugin.name
        values |= {**flatten({name: plugin.options}), name: "on"}
        values[f"{name}: summary"] = plugin.summary
        if plugin.origin != BUNDLED:
            values[f"{name}: from"] = plugin.origin
    return values


def only_times_differ(row: Row) -> bool:
    """Tell whether two summaries differ only in seconds, which no two runs share."""
    return row.name.endswith(": summary") and TIME.sub("", row.a) == TIME.sub("", row.b)


def data(title: str, a: Data | None, b: Data | None) -> Section:
    """Compare data sets: the parts of their keys, and the counts of their rows."""
    counts = [numbers(name, getattr(a, name, None), getattr(b, name, None)) for name in COUNTS]
    differing = [row for row in counts if row.a != row.b] + rows(details(a), details(b))
    lines = list[str]()
    if a and b and a.key_parts and b.key_parts:
        changes = dict.fromkeys(differences(a.key_parts, b.key_parts))
        lines = [f"tokens of B: {change}" for change in changes]
    elif a and b and a.key != b.key:
        lines = ["tokens of B: prepared differently; the record does not say how"]
    return Section(title, differing, lines)


def details(data: Data | None) -> dict[str, Any]:
    """Return what is known of data besides the counts."""
    if data is None:
        return {}
    lengths = data.lengths
    return {
        **{f"bad rows, {reason}": rows.count for reason, rows in data.bad_rows.items()},
        **{f"encoded by {name}": count for name, count in data.engines.items()},
        "length, median": figure(lengths.median),
        "length, 95th percentile": figure(lengths.p95),
        "length, longest": figure(lengths.max),
        "mask": data.mask,
        "sources": ", ".join(source.name for source in data.sources) or None,
        "truncated": data.truncated.count,
    }


def results(a: RunRecord, b: RunRecord) -> Iterator[Row]:
    """Yield the results and the costs of the runs."""
    yield numbers("steps", a.steps.done, b.steps.done)
    for name in dict.fromkeys([*a.series, *b.series]):
        if name not in RESULTS and not name.startswith("eval_"):
            continue
        first, second = (dict(finite(run.series.get(name, []))) for run in (a, b))
        ends = [points[max(points)] if points else None for points in (first, second)]
        yield numbers(name, *ends)
        common = max(first.keys() & second.keys(), default=None)
        if common is not None and max(first) != max(second):
            yield numbers(f"{name} at step {common:,}", first[common], second[common])
    for name, (table, key) in COSTS.items():
        yield numbers(name, *(getattr(run, table).get(key) for run in (a, b)))
    yield numbers("seconds", a.seconds, b.seconds)


def numbers(name: str, first: float | None, second: float | None) -> Row:
    """Return a row of two numbers, and the relative change."""
    change = ""
    # A relative change across zero has no meaning.
    if first and second is not None and first != second and first * second >= 0:
        percent = 100 * (second - first) / abs(first)
        change = f"{percent:+,.0f}%" if abs(percent) >= 10 else f"{percent:+.2g}%"
        if abs(percent) < 100 * ROUNDING:
            change = "rounding"
    return Row(name.replace("_", " "), figure(first), figure(second), change)


def figure(value: float | None) -> str:
    """Return a number in few digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.5g}"


def losses(a: RunRecord, b: RunRecord) -> list[str]:
    """Say whether the losses are the same, or at which step they diverge."""
    one, other = (dict(run.series.get("loss", [])) for run in (a, b))
    common = sorted(one.keys() & other.keys())
    for step in common:
        if not are_close(one[step], other[step]):
            return [f"losses diverge at step {step:,}: {text(one[step])} and {text(other[step])}"]
    same = f"losses are the same in all {len(common):,} common steps"
    if any(one[step] != other[step] for step in common):
        same += f", but for rounding (relative differences below {ROUNDING:g})"
    return [same] if common else []


def are_close(first: float | None, second: float | None) -> bool:
    """Tell whether two losses differ by rounding at most; None is not finite."""
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=ROUNDING)
