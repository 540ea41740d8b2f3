"""A run's record as one HTML page that needs no network; report.html has its words and places."""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ..base.atomic import write_text
from .folder import read_run
from .metrics import SAMPLES, read_metrics
from .run_record import Points, RunRecord, figure, finite

SKELETON = Path(__file__).with_name("report.html")
HEAD = Path(__file__).with_name("head.html")
"""The head and the styles that all pages share."""
NOT_SETUP = {
    "name",
    "status",
    "reason",
    "plugins",
    "data",
    "eval",
    "final",
    "profile",
}
DRAWN = ("rows", "examples", "tokens", "trained_tokens", "lengths")
"""What the page's script draws of the data."""
SMOOTHED = 30
"""Points of a smoothed curve; a curve of fewer than twice as many is shown as it is."""
STEADY = ("learning_rate", "memory_gib", "eval_")
# A point takes some 20 bytes: a page with 20 curves has about 400 KiB.
MAX_POINTS, MAX_ROWS, MAX_TEXT, MAX_PROMPTS, MAX_STEPS = 900, 120, 400, 10, 12


def write(folder: Path) -> Path:
    """Write a run's report.html from its run.json and metrics.jsonl."""
    path = folder / "report.html"
    write_text(path, render(read_run(folder), read_metrics(folder / SAMPLES)))
    return path


def render(run: RunRecord, samples: Sequence[dict[str, Any]] = ()) -> str:
    """The whole page: its script finds the curves' numbers in it."""
    series = run.series
    noisy = {k: v for k, v in series.items() if len(v) >= 2 * SMOOTHED and not k.startswith(STEADY)}
    tables = {key: run.facts.get(key) or {} for key in ("data", "eval")}
    numbers = {
        "curves": {key: _curve(points) for key, points in series.items()},
        "smooth": {key: _curve(_smooth(points)) for key, points in noisy.items()},
        "whole": {key: len(points) for key, points in series.items()},
        "per_epoch": run.steps.per_epoch,
        **{key: {name: table.get(name) for name in DRAWN} for key, table in tables.items()},
    }
    shares = {name: f"{share:.0%}" for name, share in run.profile.shares.items()}
    return fill_page(
        SKELETON,
        run=run,
        numbers=numbers,
        notes={"reason": run.reason} if run.reason else {},
        samples=_samples(samples),
        profile=shares and {**shares, "findings": run.profile.findings},
        plugins=_plugins(run),
        setup=_setup(run),
    )


def fill_page(skeleton: Path, **parts: Any) -> str:
    """Fill in a page with the shared head; texts are escaped, unless the page calls them safe."""
    page = PAGES.from_string(skeleton.read_text("utf-8")).render(parts)
    return page.encode("utf8", "replace").decode()


def _stretches(points: Points, count: int) -> list[Points]:
    """Cut a curve into at most `count` pieces."""
    size = -(-len(points) // count)
    return [points[start : start + size] for start in range(0, len(points), size)]


def _smooth(points: Points) -> Points:
    """The means of stretches, in the middle of each, so that the line does not lag."""
    values = [finite(stretch) for stretch in _stretches(points, SMOOTHED)]
    return [(fmean(step for step, _ in it), fmean(y for _, y in it)) for it in values if it]


def _curve(points: Points) -> dict[str, list[Any]]:
    """Thin out points: keep both ends, and each stretch's extremes and one missing value."""
    if len(points) > MAX_POINTS:
        kept = {points[0], points[-1]}
        for stretch in _stretches(points, MAX_POINTS // 3 - 1):
            values = sorted(finite(stretch), key=itemgetter(1))
            missing = [point for point in stretch if point[1] is None]
            kept.update(values[:1] + values[-1:] + missing[:1])
        points = sorted(kept, key=itemgetter(0))
    return {"x": [step for step, _ in points], "y": [v and float(f"{v:.6g}") for _, v in points]}


def _show(value: Any) -> str:
    """Write a value for people, and cut it."""
    text = figure(value)
    return text[:MAX_TEXT] + "…" * (len(text) > MAX_TEXT)


def _lines(table: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """Names and values of a table; a list of texts takes a line for each, numbers share one."""
    lines = []
    for name, value in islice(table.items(), MAX_ROWS):
        items = value[:MAX_ROWS] if isinstance(value, list) else [value]
        if int in map(type, items):
            items = [" ".join(map(figure, items))]
        lines.append((name, items))
    return lines


def _samples(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The answers to each prompt: the last, and some evenly before it."""
    answers: dict[str, dict[int, str]] = {}
    for line in lines:
        answers.setdefault(str(line.get("prompt")), {})[line["step"]] = str(line.get("answer"))
    shown = {}
    for prompt, by_step in islice(answers.items(), MAX_PROMPTS):
        every = -(-len(by_step) // MAX_STEPS)
        steps = reversed(sorted(by_step, reverse=True)[::every])
        shown[prompt] = {f"step {step:,}": by_step[step] or "(empty)" for step in steps}
    return shown


def _plugins(run: RunRecord) -> dict[str, list[str]]:
    """What each plugin did, where it is from, and its options."""
    plugins = {}
    for plugin in run.plugins:
        options = ", ".join(f"{k} = {json.dumps(v)}" for k, v in plugin.options.items())
        plugins[plugin.name] = [plugin.summary, plugin.origin, options]
    return plugins


def _setup(run: RunRecord) -> dict[str, dict[str, Any]]:
    """The tables of run.json that have no place of their own on the page."""
    tables: dict[str, dict[str, Any]] = {"run": {}}
    for key, value in run.facts.items():
        if key not in NOT_SETUP:
            where = tables.setdefault(key, {}) if isinstance(value, dict) else tables["run"]
            where |= run.table(key)
    return tables


# Pages of other rooms include the head, which lies here.
PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    keep_trailing_newline=True,
)
PAGES.filters |= {"show": _show, "lines": _lines}
PAGES.policies["json.dumps_kwargs"] = {"sort_keys": False}
