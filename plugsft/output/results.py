"""Results of a run in a few lines, and `plugsft diff`: the differences of two runs."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..base.console import say
from ..base.errors import PlugsftError
from ..base.for_commands import print_table
from ..recipe.parse import changed, flatten
from .folder import how_to_continue, read_recipe, read_run
from .run_record import RunRecord, figure, finite, label

WIDE = 36
"""Most characters of a column; a longer value has a line of its own."""
TRAINED = ("loss", "accuracy", "margin")
"""Training metrics that are results; every evaluation metric is one."""
ROUNDING = 1e-6
"""A relative difference that rounding explains."""
TIME = re.compile(r"\b[\d.,]+ (ms|s|min)\b")


def show_run(folder: Path) -> None:
    """Print the results of a run."""
    print_table(summarize(folder))


def summarize(folder: Path) -> list[tuple[str, str]]:
    """What `show` and notebooks list: names and texts."""
    return [(name, text) for name, text in _summary(read_run(folder)) if text]


def _summary(run: RunRecord) -> Iterator[tuple[str, str]]:
    folder, machine, model = run.folder, run.machine, run.model
    reason = f"continue with {how_to_continue(folder)}" if run.status == "killed" else run.reason
    yield "status", run.status + (f": {reason}" if reason else "")
    yield "started", run.started
    yield from run.figures.items()
    yield "machine", ", ".join(filter(None, (machine.host, machine.device, machine.launcher)))
    if model.type:
        count = f"{model.parameters:,} parameters, {model.dtype}"
        yield "model", f"{model.type} ({model.source}), {count}"
    for name, data in (("data", run.data), ("eval", run.eval)):
        if data:
            yield name, f"{', '.join(source.name for source in data.sources)}: {data}"
            yield "mask", data.mask
    for plugin in run.plugins:
        yield "plugin", f"{plugin.name}: {plugin.summary}"
    if (folder / "report.html").is_file():
        yield "report", str(folder / "report.html")
    if (folder / "model").is_dir():
        yield "talk", f"plugsft chat {shlex.quote(str(folder))}"


class Comparison(NamedTuple):
    """A value of each run, and the relative change from A to B."""

    name: str
    a: str
    b: str
    change: str = ""


Section = tuple[str, list[Comparison], list[str]]
"""Title, rows, and further lines of the differences in one part of the runs."""


def diff(first: Path, second: Path) -> None:
    """Print the differences of two runs."""
    a, b = read_run(first), read_run(second)
    if first.samefile(second):
        raise PlugsftError(f"{second}: is the same run; name another run's output folder")
    sections = [*compare(a, b)]
    for name, run in (("A", a), ("B", b)):
        steps = f"{run.steps.done:,} of {run.steps.total:,} steps"
        say(f"{name}  {run.folder}: {run.status}, {steps}, started {run.started}")
    for title, rows, lines in sections:
        if rows or lines:
            show(title, rows, lines)
    if same := [title for title, rows, lines in sections if not (rows or lines)]:
        say(f"\nthe same: {', '.join(same)}")


def show(title: str, rows: list[Comparison], lines: list[str]) -> None:
    """Print two values in a line, then long ones below each other."""
    long = [row for row in rows if max(len(row.a), len(row.b)) > WIDE]
    say("")
    short = [row for row in rows if row not in long]
    print_table([Comparison(title, "A", "B"), *short])
    for row in long:
        say(f"{row.name}  A: {row.a}\n{'':<{len(row.name)}}  B: {row.b}")
    for line in lines:
        say(line)


def compare(a: RunRecord, b: RunRecord) -> Iterator[Section]:
    """Yield the differences, and the results even if they are the same."""
    yield "recipe", differing(recipe_keys(a.folder), recipe_keys(b.folder)), []
    yield "plugins", differing(plugins(a), plugins(b)), []
    for title in ("versions", "machine", "model", "precision"):
        yield title, differing(a.table(title), b.table(title)), []
    for title, one, other in (("data", a.data, b.data), ("eval", a.eval, b.eval)):
        parts = changed(flatten(one.key_parts), flatten(other.key_parts)) if one and other else []
        lines = [f"the tokens differ in {', '.join(parts)}"] if parts else []
        yield title, differing(a.table(title), b.table(title)), lines
    rows = [*results(a, b)]
    for title in ("throughput", "batches", "memory", "seconds"):
        rows += differing(a.table(title), b.table(title))
    yield "results", rows, losses(a, b)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Comparison]:
    """Rows of what differs only: two runs have hundreds of values in common."""
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    return [compared(name, a.get(name), b.get(name)) for name in names]


def compared(name: str, a: Any, b: Any) -> Comparison:
    """Write two values, and the relative change of numbers; a missing value is None."""
    change = ""
    # A relative change across zero has no meaning.
    if isinstance(a, int | float) and isinstance(b, int | float) and a * b > 0 and a != b:
        share = (b - a) / abs(a)
        digits = "+,.0f" if share >= 1 else "+.3g"
        change = "rounding" if abs(share) < ROUNDING else f"{100 * share:{digits}}%"
    return Comparison(name, figure(a), figure(b), change)


def recipe_keys(folder: Path) -> dict[str, Any]:
    """The keys as overrides write them, to be copied; plugins have a section of their own."""
    recipe = read_recipe(folder)
    return flatten({key: recipe[key] for key in recipe if key not in ("output", "plugins")})


def plugins(run: RunRecord) -> dict[str, Any]:
    """Options, summaries and origins: another version of a plugin is a difference, too."""
    values: dict[str, Any] = {}
    for plugin in run.plugins:
        name = plugin.name
        values |= {**flatten({name: plugin.options}), name: "on"}
        # No two runs share the seconds in a summary.
        summary = TIME.sub("…", plugin.summary)
        values |= {f"{name}: summary": summary, f"{name}: from": plugin.origin}
    return values


def results(a: RunRecord, b: RunRecord) -> Iterator[Comparison]:
    """Yield the results of the runs at their ends, and at the last step that both have."""
    yield compared("steps", a.steps.done, b.steps.done)
    for name in dict.fromkeys([*a.series, *b.series]):
        if name in TRAINED or name.startswith("eval_"):
            first, second = (dict(finite(run.series.get(name, []))) for run in (a, b))
            ends = [max(points, default=0) for points in (first, second)]
            yield compared(label(name), first.get(ends[0]), second.get(ends[1]))
            common = max(first.keys() & second.keys(), default=None)
            if common is not None and ends[0] != ends[1]:
                yield compared(f"{label(name)} at step {common:,}", first[common], second[common])


def losses(a: RunRecord, b: RunRecord) -> list[str]:
    """Say whether the losses are the same, or at which step they diverge."""
    one, other = (dict(finite(run.series.get("loss", []))) for run in (a, b))
    common = sorted(one.keys() & other.keys())
    for step in common:
        if not math.isclose(one[step], other[step], rel_tol=ROUNDING):
            return [f"losses diverge at step {step:,}: {one[step]} and {other[step]}"]
    same = f"losses are the same in all {len(common):,} common steps"
    if any(one[step] != other[step] for step in common):
        same += ", but for rounding"
    return [same] if common else []
