"""A run's record as one HTML page that needs no network."""

import html
import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..base.atomic import replace_file
from ..base.errors import reason_of
from ..base.limits import TABLES, check_depth, parse_json, read_text
from .samples import SAMPLES, samples_section

Points = list[tuple[float, float | None]]

SKELETON = Path(__file__).with_name("report.html")
HEAD = Path(__file__).with_name("head.html")
"""The head and the styles that all pages share."""
NOT_CURVES = {"step", "epoch", "eval_tokens"}
NOT_FACTS = {"name", "status", "reason", "warnings", "plugins", "data", "eval", "final"}
NOT_FACTS |= {"started", "profile"}
STEADY = ("learning_rate", "memory_gib", "eval_")
# A point takes at most some 20 bytes; with the limits on texts a page stays below 400 KiB.
MAX_POINTS, MAX_CURVES, MAX_ITEMS, MAX_TEXT = 13_000, 60, 30, 600


def write(folder: Path) -> Path:
    """Write a run's report.html from its run.json and metrics.jsonl."""
    try:
        run = read_record(folder)
    except (FileNotFoundError, TypeError, ValueError) as error:
        run = {"name": folder.name, "warnings": [f"run.json cannot be read: {reason_of(error)}"]}
    metrics, samples = (read_metrics(folder / name) for name in ("metrics.jsonl", SAMPLES))
    page, path = render(run, metrics, samples), folder / "report.html"
    with replace_file(path) as draft:
        draft.write_text(page, "utf-8", errors="replace")
    return path


class _Steps(BaseModel):
    model_config = ConfigDict(strict=True)

    done: int = Field(0, ge=0, lt=2**63)
    total: int = Field(0, ge=0, lt=2**63)
    per_epoch: int = Field(0, ge=0, lt=2**63)


class _Plugin(BaseModel):
    name: str
    options: dict[str, Any] = {}
    summary: str | None = None


class _Run(BaseModel):
    """The fields of run.json that readers use, if present."""

    model_config = ConfigDict(strict=True)

    status: str = ""
    reason: str | None = None
    started: str = ""
    steps: _Steps | None = None
    final: dict[str, Any] | None = None
    throughput: dict[str, Any] | None = None
    plugins: list[_Plugin] = []


def read_record(folder: Path) -> dict[str, Any]:
    """Read run.json; raise ValueError if plugsft did not write it."""
    record = parse_json(read_text(folder / "run.json"))
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    try:
        _Run.model_validate(check_depth(record, TABLES))
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from error
    return record


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl that have a step; a killed run leaves a partial one."""
    lines = []
    for text in path.read_text("utf-8", errors="replace").split("\n") if path.exists() else ():
        with suppress(TypeError, ValueError):
            line = check_depth(parse_json(text), 2)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


def render(
    run: dict[str, Any], metrics: list[dict[str, Any]], samples: Sequence[dict[str, Any]] = ()
) -> str:
    """Return a run's page."""
    series = series_of(metrics)
    tables = {key: _numeric(table_of(run, key)) for key in ("steps", "data", "eval")}
    figures = json.dumps({**_curves(series), "parts": tables}).replace("<", "\\u003c")
    parts = {
        "name": _show(run.get("name", "run")),
        "head": _head(run, series),
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
    return page


def number(value: object) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # False for NaN and the infinities, and exact for integers of any size.
    return value if abs(value) < 1e300 else None


def table_of(record: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a table of a record, or an empty one."""
    table = record.get(key)
    return table if isinstance(table, dict) else {}


def _numeric(table: dict[str, Any]) -> dict[str, Any]:
    flat = (table | table_of(table, "lengths")).items()
    return {k: [*map(number, v)] if isinstance(v, list) else number(v) for k, v in flat}


def series_of(metrics: list[dict[str, Any]]) -> dict[str, Points]:
    """Return the points of each metric, the losses first."""
    series: dict[str, Points] = {}
    for line in metrics:
        step = line["step"]
        for key, value in line.items():
            points = series.setdefault(key, [])
            # A resumed run repeats steps after its checkpoint: the later values count.
            while points and points[-1][0] >= step:
                points.pop()
            points.append((step, number(value)))
    known = (key for key in series if key not in NOT_CURVES and finite(series[key]))
    # Of too many curves, the last ones are left out: never a loss.
    return {key: series[key] for key in sorted(known, key=lambda key: not key.endswith("loss"))}


def finite(points: Points) -> list[tuple[float, float]]:
    """Return the points that have a value."""
    return [(step, value) for step, value in points if value is not None]


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
        indices, size = {0, len(points) - 1}, -(-3 * len(points) // (limit - 2))
        for start in range(0, len(points), size):
            bucket = list(enumerate(points[start : start + size], start))
            values = [(value, index) for index, (_, value) in bucket if value is not None]
            indices.update(index for _, index in (values and (min(values), max(values))))
            indices.update([index for index, (_, value) in bucket if value is None][:1])
        points = [points[index] for index in sorted(indices)]
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


def _head(run: dict[str, Any], series: dict[str, Points]) -> str:
    status, started = _show(run.get("status", "unknown")), _show(run.get("started", "no date"))
    notes = {key: run[key] for key in ("reason", "warnings") if run.get(key)}
    return f"""<p class="meta">
<span class="status {status}">{status}</span> <time>{started.replace("T", " ")}</time></p>
<h1>{_show(run.get("name", "run"))}</h1>
<p class="result">{_result(run, series)}</p>
{f'<div class="note {status}">{_facts(notes)}</div>' if notes else ""}"""


def _result(run: dict[str, Any], series: dict[str, Points]) -> str:
    steps, loss = table_of(run, "steps"), number(table_of(run, "final").get("loss"))
    names = ("loss", "eval_loss", "eval_accuracy")
    losses, evals, right = (finite(series.get(key, [])) for key in names)
    text = "No finite loss was recorded" if loss is None else f"Final loss {_show(loss)}"
    if losses and (loss is None or run.get("status") != "completed"):
        text = f"Loss {_show(losses[-1][1])} at step {_show(losses[-1][0])}"
    text += f"; evaluation loss {_show(evals[-1][1])}" if evals else ""
    text += f", accuracy {_show(right[-1][1])}" if evals and right else ""
    if "done" in steps:
        text += f"; {_show(steps['done'])} of {_show(steps.get('total'))} steps"
    if seconds := number(run.get("seconds")):
        size, unit = (3600, "h") if seconds > 5400 else (60, "min") if seconds > 90 else (1, "s")
        text += f" in {seconds / size:.3g} {unit}"
    rate = table_of(run, "throughput").get("tokens_per_second")
    return f"{text}, at {_show(rate)} tokens per second." if rate else f"{text}."


def _profile(profile: dict[str, Any]) -> str:
    """Draw the shares of a step's time, and the findings of a profiler."""
    shares = [(name, number(share) or 0) for name, share in table_of(profile, "shares").items()]
    bars = "".join(
        f'<div class="part"><dt>{_show(name)}</dt><dd>{share:.0%}</dd><dd class="bar">'
        f'<i style="width: {min(1, share):.1%}"></i></dd></div>\n'
        for name, share in sorted(shares, key=lambda share: -share[1])
        if share >= 0.005
    )
    findings = "".join(f"<p>{_show(line)}</p>" for line in profile.get("findings") or ())
    note = findings and f'<div class="note">{findings}</div>'
    return f'<h2>Where the time went</h2>\n{note}<dl class="shares">{bars}</dl>\n' if bars else ""


def _sections(run: dict[str, Any]) -> str:
    page, plugins = _profile(table_of(run, "profile")), dict[str, Any]()
    for key, title in (("data", "Training data"), ("eval", "Evaluation data")):
        if data := {k: v for k, v in table_of(run, key).items() if k != "key_parts"}:
            pair = f'<div id="{key}"></div>{_facts(data)}'
            page += f'<h2>{title}</h2>\n<div class="pair">{pair}</div>\n'
    for item in run.get("plugins") or ():
        options = [f"{k} = {json.dumps(v)}" for k, v in table_of(item, "options").items()]
        origin = " ".join(filter(None, [item.get("origin"), item.get("version")]))
        texts = [item.get("summary") or "no summary", origin, ", ".join(options)]
        plugins[str(item.get("name"))] = texts if options else texts[:2]
    if plugins:
        page += f'<h2>Plugins</h2>\n<div class="plugins">{_facts(plugins, spaced=False)}</div>\n'
    facts = {k: v for k, v in run.items() if k not in NOT_FACTS and v is not None}
    tables = {key: value for key, value in facts.items() if isinstance(value, dict)}
    tables["run"] = {key: value for key, value in facts.items() if key not in tables}
    page += '<h2>Setup</h2>\n<div class="facts">'
    for key in (name for name in tables if tables[name]):
        page += f"<div><h3>{_show(key)}</h3>{_facts(tables[key], key != 'versions')}</div>\n"
    return f"{page}</div>"
