"""A run's record as one HTML page that needs no network."""

import html
import json
from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from ..base.atomic import write_text
from ..base.errors import reason_of
from .metrics import SAMPLES, read_metrics
from .run_record import Points, RunRecord, finite

SKELETON = Path(__file__).with_name("report.html")
HEAD = Path(__file__).with_name("head.html")
"""The head and the styles that all pages share."""
NOT_SETUP = {"name", "status", "reason", "warnings", "plugins", "data", "eval", "final"}
NOT_SETUP |= {"started", "profile"}
DRAWN: dict[str, Any] = dict.fromkeys(("rows", "examples", "tokens", "trained_tokens"), True)
DRAWN |= {"lengths": {"edges", "counts"}}
STEADY = ("learning_rate", "memory_gib", "eval_")
# A point takes at most some 20 bytes; with the limits on texts a page stays below 400 KiB.
MAX_POINTS, MAX_CURVES, MAX_ITEMS, MAX_TEXT = 13_000, 60, 30, 400
MAX_PROMPTS, MAX_STEPS = 10, 12


def write(folder: Path) -> Path:
    """Write a run's report.html from its run.json and metrics.jsonl."""
    try:
        run = RunRecord.read(folder)
    except (OSError, ValueError) as error:
        unreadable = [f"run.json cannot be read: {reason_of(error)}"]
        run = RunRecord(folder=folder, status="unknown", name=folder.name, warnings=unreadable)
    path = folder / "report.html"
    write_text(path, render(run, read_metrics(folder / SAMPLES)))
    return path


def render(run: RunRecord, samples: Sequence[dict[str, Any]] = ()) -> str:
    """Return a run's page."""
    tables = run.model_dump(include={"steps": {"per_epoch"}, "data": DRAWN, "eval": DRAWN})
    figures = json.dumps({**_curves(run.series), "parts": tables}).replace("<", "\\u003c")
    parts = {
        "name": _show(run.name),
        "head": _head(run),
        "sections": samples_section(samples) + _sections(run),
        "numbers": figures,
    }
    return fill_page(SKELETON, scripts="; script-src 'unsafe-inline'", **parts)


def _curves(series: dict[str, Points]) -> dict[str, Any]:
    """Return the points of the curves, and smoothed points of noisy ones."""
    shown = dict(islice(series.items(), MAX_CURVES))
    noisy = {k: v for k, v in shown.items() if len(v) >= 60 and not k.startswith(STEADY)}
    limit = min(1200, MAX_POINTS // max(1, len(shown)))
    return {
        "curves": {key: _curve(points, limit) for key, points in shown.items()},
        "smooth": {key: _curve(_smooth(points), limit // 4) for key, points in noisy.items()},
        "whole": {key: len(points) for key, points in series.items()},
    }


def fill_page(skeleton: Path, scripts: str = "", **parts: str) -> str:
    """Return a page with the shared head and these parts; their texts are escaped."""
    page = skeleton.read_text("utf-8").replace("<!--shared head-->\n", HEAD.read_text("utf-8"))
    # An escaped text holds no "<", so it cannot pass for a mark.
    for mark, part in {"scripts": scripts, **parts}.items():
        page = page.replace(f"<!--{mark}-->", part)
    return page.encode("utf8", "replace").decode()


def _smooth(points: Points) -> Points:
    """Return moving averages over neighbours on both sides, so that the line does not lag."""
    values = [value for _, value in finite(points)]
    size, reach = len(values), len(values) // 60
    for _ in range(2):
        sums = list(accumulate(values, initial=0.0))
        spans = ((max(0, at - reach), min(size, at + reach + 1)) for at in range(size))
        values = [(sums[end] - sums[start]) / (end - start) for start, end in spans]
    averages = iter(values)
    return [(step, value if value is None else next(averages)) for step, value in points]


def _curve(points: Points, limit: int) -> dict[str, list[Any]]:
    """Thin out points: keep both ends, and each bucket's extremes and one missing value."""
    if len(points) > limit:
        kept, size = {points[0], points[-1]}, -(-3 * len(points) // (limit - 2))
        for start in range(0, len(points), size):
            bucket = points[start : start + size]
            values = sorted(finite(bucket), key=lambda point: point[1])
            missing = [point for point in bucket if point[1] is None]
            kept.update(values[:1] + values[-1:] + missing[:1])
        points = sorted(kept, key=lambda point: point[0])
    return {"x": [step for step, _ in points], "y": [v and float(f"{v:.6g}") for _, v in points]}


def _show(value: Any) -> str:
    """Format a value for people, escaped for HTML."""
    match value:
        case None | "" | []:
            return "none"
        case {"count": count, "rows": [*rows]}:
            shown = ", ".join(map(str, rows[:10])) + ", …" * (count != len(rows[:10]))
            return _show(count) + f" (rows {_show(shown)})" * bool(rows)
        case {"edges": _, "counts": _, **rest}:
            return _show(rest)
        case dict():
            return ", ".join(f"{_show(key)} {_show(item)}" for key, item in value.items()) or "none"
        case list():
            return ", ".join(map(_show, value[:MAX_ITEMS]))
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
    return html.escape(str(value)[:MAX_TEXT] + "…" * (len(str(value)) > MAX_TEXT))


def _facts(table: dict[str, Any], spaced: bool = True) -> str:
    rows = ""
    for key, value in islice(table.items(), 4 * MAX_ITEMS):
        texts = [_show(item) for item in value] if isinstance(value, list) else [_show(value)]
        if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
            texts = [f"{_show(name)}: {_show(item)}" for name, item in value.items()]
        more = [f"and {len(texts) - MAX_ITEMS} more"] * (len(texts) > MAX_ITEMS)
        items = "".join(f"<dd>{item}</dd>" for item in [*texts[:MAX_ITEMS], *more] or ["none"])
        label = _show(key.replace("_", " ").replace(" gib", ", GiB") if spaced else key)
        rows += f"<div><dt>{label}</dt>{items}</div>\n"
    return f"<dl>\n{rows}</dl>"


def _head(run: RunRecord) -> str:
    status, started = _show(run.status), _show(run.started)
    notes = {k: v for k, v in (("reason", run.reason), ("warnings", run.warnings)) if v}
    return f"""<p class="meta">
<span class="status {status}">{status}</span> <time>{started.replace("T", " ")}</time></p>
<h1>{_show(run.name)}</h1>
<p class="result">{_result(run)}</p>
{f'<div class="note {status}">{_facts(notes)}</div>' if notes else ""}"""


def _result(run: RunRecord) -> str:
    texts = [f"{run.steps.done:,} of {run.steps.total:,} steps"]
    texts += [f"{name} {text}" for _, name, text in run.figures]
    if rights := finite(run.series.get("eval_accuracy", [])):
        texts.append(f"evaluation accuracy {_show(rights[-1][1])}")
    return "; ".join(texts)


def samples_section(lines: Sequence[dict[str, Any]]) -> str:
    """Return the answers to each prompt over the steps; texts are escaped and cut."""
    answers: dict[str, dict[int, str]] = {}
    for line in lines:
        prompt, answer = line.get("prompt"), line.get("answer")
        if isinstance(prompt, str) and isinstance(answer, str):
            answers.setdefault(prompt, {})[line["step"]] = answer
    if not answers:
        return ""
    shown = islice(answers.items(), MAX_PROMPTS)
    parts = "".join(f"<h3>{_show(prompt)}</h3>\n{_table(steps)}" for prompt, steps in shown)
    note = '<p class="small">samples.jsonl has all prompts and steps.</p>'
    return f'<h2>Samples</h2>\n<div class="samples">\n{parts}</div>\n{note}\n'


def _table(answers: dict[int, str]) -> str:
    """Return a prompt's answers by step: the first, the last, and some between."""
    steps, last = sorted(answers), len(answers) - 1
    if len(steps) > MAX_STEPS:
        steps = [steps[last * number // (MAX_STEPS - 1)] for number in range(MAX_STEPS)]
    rows = "".join(
        f"<div><dt>step {step:,}</dt><dd>{_show(answers[step] or '(empty)')}</dd></div>\n"
        for step in steps
    )
    return f"<dl>\n{rows}</dl>\n"


def _sections(run: RunRecord) -> str:
    page, plugins = _profile(run), dict[str, Any]()
    for key, title in (("data", "Training data"), ("eval", "Evaluation data")):
        table = run.facts.get(key) or {}
        if data := {k: v for k, v in table.items() if k != "key_parts"}:
            pair = f'<div id="{key}"></div>{_facts(data)}'
            page += f'<h2>{title}</h2>\n<div class="pair">{pair}</div>\n'
    for plugin in run.plugins:
        options = ", ".join(f"{k} = {json.dumps(v)}" for k, v in plugin.options.items())
        plugins[plugin.name] = [plugin.summary or "no summary", plugin.origin, options]
    if plugins:
        page += f'<h2>Plugins</h2>\n<div class="plugins">{_facts(plugins, spaced=False)}</div>\n'
    page += '<h2>Setup</h2>\n<div class="facts">'
    tables: dict[str, Any] = {"run": {}}
    for key, value in run.facts.items():
        if value is not None and key not in NOT_SETUP:
            (tables if isinstance(value, dict) else tables["run"])[key] = value
    for key, table in tables.items():
        page += f"<div><h3>{_show(key)}</h3>{_facts(table, key != 'versions')}</div>\n"
    return f"{page}</div>"


def _profile(run: RunRecord) -> str:
    """Draw the shares of a step's time, and the findings of a profiler."""
    bars = "".join(
        f'<div class="part"><dt>{_show(name)}</dt><dd>{share:.0%}</dd><dd class="bar">'
        f'<i style="width: {min(1, share):.1%}"></i></dd></div>\n'
        for name, share in sorted(run.profile.shares.items(), key=lambda share: -share[1])
        if share >= 0.005
    )
    findings = "".join(f"<p>{_show(line)}</p>" for line in run.profile.findings)
    note = findings and f'<div class="note">{findings}</div>'
    return f'<h2>Where the time went</h2>\n{note}<dl class="shares">{bars}</dl>\n' if bars else ""
