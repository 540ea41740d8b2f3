"""A run's record as one HTML page that needs no network."""

import html
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

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
    "warnings",
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
    parts = {
        "name": _show(run.name),
        "head": _head(run),
        "sections": samples_section(samples) + _sections(run),
        "numbers": json.dumps(numbers).replace("<", "\\u003c"),
    }
    return fill_page(SKELETON, scripts="; script-src 'unsafe-inline'", **parts)


def fill_page(skeleton: Path, scripts: str = "", **parts: str) -> str:
    """Fill in a page with the shared head; the texts of the parts are escaped."""
    page = skeleton.read_text("utf-8").replace("<!--shared head-->\n", HEAD.read_text("utf-8"))
    # An escaped text holds no "<", so it cannot pass for a mark.
    for mark, part in {"scripts": scripts, **parts}.items():
        page = page.replace(f"<!--{mark}-->", part)
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
    """Write a value for people, escaped for HTML and cut."""
    text = figure(value)
    return html.escape(text[:MAX_TEXT] + "…" * (len(text) > MAX_TEXT))


def _facts(table: Mapping[str, Any]) -> str:
    """Write a list of names and values; a value that is a list takes a line for each item."""
    rows = ""
    for name, value in islice(table.items(), MAX_ROWS):
        items = value[:MAX_ROWS] if isinstance(value, list) else [value]
        shown = "".join(f"<dd>{_show(item)}</dd>" for item in items)
        rows += f"<div><dt>{_show(name)}</dt>{shown}</div>\n"
    return f"<dl>\n{rows}</dl>"


def _head(run: RunRecord) -> str:
    status, started = _show(run.status), _show(run.started)
    notes = {k: v for k, v in (("reason", run.reason), ("warnings", run.warnings)) if v}
    results = "; ".join(f"{name} {text}" for name, text in run.figures.items())
    return f"""<p class="meta">
<span class="status {status}">{status}</span> <time>{started.replace("T", " ")}</time></p>
<h1>{_show(run.name)}</h1>
<p class="result">{results}</p>
{f'<div class="note {status}">{_facts(notes)}</div>' if notes else ""}"""


def samples_section(lines: Sequence[dict[str, Any]]) -> str:
    """The answers to each prompt: the last, and some evenly before it."""
    answers: dict[str, dict[int, str]] = {}
    for line in lines:
        answers.setdefault(str(line.get("prompt")), {})[line["step"]] = str(line.get("answer"))
    if not answers:
        return ""
    parts = ""
    for prompt, by_step in islice(answers.items(), MAX_PROMPTS):
        every = -(-len(by_step) // MAX_STEPS)
        steps = reversed(sorted(by_step, reverse=True)[::every])
        rows = {f"step {step:,}": by_step[step] or "(empty)" for step in steps}
        parts += f"<h3>{_show(prompt)}</h3>\n{_facts(rows)}\n"
    note = '<p class="small">samples.jsonl has all prompts and steps.</p>'
    return f'<h2>Samples</h2>\n<div class="samples">\n{parts}</div>\n{note}\n'


def _sections(run: RunRecord) -> str:
    page, plugins = "", dict[str, Any]()
    if profile := {name: f"{share:.0%}" for name, share in run.profile.shares.items()}:
        findings = {"findings": run.profile.findings}
        page = f"<h2>Where the time went</h2>\n{_facts(profile | findings)}\n"
    for key, title in (("data", "Training data"), ("eval", "Evaluation data")):
        if data := run.table(key):
            pair = f'<div id="{key}"></div>{_facts(data)}'
            page += f'<h2>{title}</h2>\n<div class="pair">{pair}</div>\n'
    for plugin in run.plugins:
        options = ", ".join(f"{k} = {json.dumps(v)}" for k, v in plugin.options.items())
        plugins[plugin.name] = [plugin.summary, plugin.origin, options]
    if plugins:
        page += f'<h2>Plugins</h2>\n<div class="plugins">{_facts(plugins)}</div>\n'
    tables: dict[str, Any] = {"run": {}}
    for key, value in run.facts.items():
        if key not in NOT_SETUP:
            where = tables.setdefault(key, {}) if isinstance(value, dict) else tables["run"]
            where |= run.table(key)
    setup = "".join(f"<div><h3>{_show(key)}</h3>{_facts(tables[key])}</div>\n" for key in tables)
    return f'{page}<h2>Setup</h2>\n<div class="facts">{setup}</div>'
