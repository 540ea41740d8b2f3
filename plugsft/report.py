"""Draw a run's record as one page that needs nothing but a browser."""

import html
import json
import os
from contextlib import suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

Points = list[tuple[float, float | None]]

SKELETON = Path(__file__).with_name("report.html")
NOT_CURVES = {"step", "epoch", "eval_tokens"}
NOT_FACTS = {"name", "status", "reason", "warnings", "plugins", "data", "eval", "final", "started"}
STEADY = {"learning_rate", "memory_gib", "eval_loss"}
# A point takes at most some 20 bytes; with the limits on texts a page stays below 400 kB.
MAX_POINTS, MAX_CURVES, MAX_ITEMS, MAX_TEXT = 13_000, 60, 30, 600


def write(folder: Path) -> Path:
    """Write the folder's report.html from its run.json and metrics.jsonl."""
    target, draft = folder / "report.html", folder / f".report.html.{os.getpid()}"
    try:
        run = dict(json.loads((folder / "run.json").read_text("utf-8")))
    except (FileNotFoundError, TypeError, ValueError) as error:
        run = {"name": folder.name, "warnings": [f"run.json cannot be read: {error}"]}
    path, metrics = folder / "metrics.jsonl", []
    for text in path.read_text("utf-8", errors="replace").split("\n") if path.exists() else ():
        # A killed run leaves half a line, and the resumed one writes on behind it.
        with suppress(TypeError, ValueError):
            metrics.append(dict(json.loads(text)))
    try:
        draft.write_text(render(run, metrics), "utf-8", errors="replace")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def render(run: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    """Return a run's page."""
    series = _series(metrics)
    drawn = dict(islice(series.items(), MAX_CURVES))
    noisy = {key: drawn[key] for key in drawn if key not in STEADY and len(drawn[key]) >= 60}
    limit = min(1200, MAX_POINTS // max(1, len(drawn)))
    numbers = {
        "curves": {key: _curve(points, limit) for key, points in drawn.items()},
        "smooth": {key: _curve(_smooth(points), limit // 4) for key, points in noisy.items()},
        "keys": len(series),
        "steps": max(map(len, series.values()), default=0),
        "per_epoch": _number(_part(run, "steps").get("per_epoch")),
        "data": {key: _drawn(_part(run, key)) for key in ("data", "eval")},
    }
    # What comes from the run holds no "<" any more, and so cannot pass for one of the marks.
    page = SKELETON.read_text("utf-8").replace("<!--name-->", _show(run.get("name", "run")))
    page = page.replace("<!--head-->", _head(run, series))
    page = page.replace("<!--sections-->", _sections(run))
    return page.replace("<!--numbers-->", json.dumps(numbers).replace("<", "\\u003c"))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # False for NaN and the infinities, and exact for integers of any size.
    return value if abs(value) < 1e300 else None


def _part(whole: dict[str, Any], key: str) -> dict[str, Any]:
    part = whole.get(key)
    return part if isinstance(part, dict) else {}


def _drawn(data: dict[str, Any]) -> dict[str, Any]:
    flat = (data | _part(data, "lengths")).items()
    return {k: [*map(_number, v)] if isinstance(v, list) else _number(v) for k, v in flat}


def _series(metrics: list[dict[str, Any]]) -> dict[str, Points]:
    series: dict[str, Points] = {}
    for line in metrics:
        if (step := _number(line.get("step"))) is None:
            continue
        for key, value in line.items():
            points = series.setdefault(key, [])
            # A resumed run does some steps again; the model has learned from the later ones only.
            while points and points[-1][0] >= step:
                points.pop()
            points.append((step, _number(value)))
    known = (key for key in series if key not in NOT_CURVES and _finite(series[key]))
    # Where there are too many curves, the last ones are left out, and never a loss.
    return {key: series[key] for key in sorted(known, key=lambda key: not key.endswith("loss"))}


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(step, value) for step, value in points if value is not None]


def _smooth(points: Points) -> Points:
    """Average each value with as many earlier as later ones, so that the line does not lag."""
    values = [value for _, value in _finite(points)]
    for _ in range(2):
        sums, last = list(accumulate(values, initial=0.0)), len(values) - 1
        reach = [min(at, last - at, len(values) // 60) for at in range(len(values))]
        values = [(sums[at + n + 1] - sums[at - n]) / (2 * n + 1) for at, n in enumerate(reach)]
    found = iter(values)
    return [(step, value if value is None else next(found)) for step, value in points]


def _curve(points: Points, limit: int) -> dict[str, list[Any]]:
    """Keep both ends, and of each bucket the lowest, the highest and one missing value."""
    if len(points) > limit:
        kept, size = {0, len(points) - 1}, -(-3 * len(points) // (limit - 2))
        for start in range(0, len(points), size):
            bucket = list(enumerate(points[start : start + size], start))
            found = [(value, at) for at, (_, value) in bucket if value is not None]
            kept.update(at for _, at in (found and (min(found), max(found))))
            kept.update([at for at, (_, value) in bucket if value is None][:1])
        points = [points[at] for at in sorted(kept)]
    values = [value if value is None else float(f"{value:.5g}") for _, value in points]
    return {"x": [step for step, _ in points], "y": values}


def _show(value: Any) -> str:
    """Return a value as a person would write it, escaped for HTML."""
    match value:
        case None | "" | []:
            return "none"
        case {"count": count, "rows": [*rows]}:
            more = ", …" * (count != len(rows[:10]))
            return f"{_show(count)} (rows {_show(', '.join(map(str, rows[:10])))}{more})"
        case dict():
            return ", ".join(f"{_show(key)} {_show(item)}" for key, item in value.items()) or "none"
        case list():
            return ", ".join(map(_show, value[:MAX_ITEMS]))
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
    return html.escape(str(value)[:MAX_TEXT] + "…" * (len(str(value)) > MAX_TEXT))


def _facts(part: dict[str, Any], spaced: bool = True) -> str:
    rows = ""
    for key, value in islice(part.items(), 4 * MAX_ITEMS):
        said = [_show(item) for item in value] if isinstance(value, list) else [_show(value)]
        if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
            said = [f"{_show(name)}: {_show(item)}" for name, item in value.items()]
        more = [f"and {len(said) - MAX_ITEMS} more"] * (len(said) > MAX_ITEMS)
        items = "".join(f"<dd>{item}</dd>" for item in [*said[:MAX_ITEMS], *more] or ["none"])
        label = _show(key.replace("_", " ").replace(" gib", ", GiB") if spaced else key)
        rows += f"<div><dt>{label}</dt>{items}</div>\n"
    return f"<dl>\n{rows}</dl>"


def _head(run: dict[str, Any], series: dict[str, Points]) -> str:
    status, started = _show(run.get("status", "unknown")), _show(run.get("started", "start unknown"))
    notes = {key: run[key] for key in ("reason", "warnings") if run.get(key)}
    meta = f'<span class="status {status}">{status}</span> <time>{started.replace("T", " ")}</time>'
    return f"""<p class="meta">{meta}</p>
<h1>{_show(run.get("name", "run"))}</h1>
<p class="result">{_result(run, series)}.</p>
{f'<div class="note {status}">{_facts(notes)}</div>' if notes else ""}"""


def _result(run: dict[str, Any], series: dict[str, Points]) -> str:
    steps, loss = _part(run, "steps"), _number(_part(run, "final").get("loss"))
    losses, evals = (_finite(series.get(key, [])) for key in ("loss", "eval_loss"))
    said = "No finite loss was recorded" if loss is None else f"Final loss {_show(loss)}"
    if loss is None and losses:
        said = f"Loss {_show(losses[-1][1])} at step {_show(losses[-1][0])}"
    said += f"; evaluation loss {_show(evals[-1][1])}" if evals else ""
    if "done" in steps:
        said += f"; {_show(steps['done'])} of {_show(steps.get('total'))} steps"
    if (seconds := _number(run.get("seconds"))) is not None:
        minutes, rest = divmod(round(seconds), 60)
        hours = f"{minutes // 60} h " * (minutes >= 60)
        said += f" in {hours}{minutes % 60} min {rest} s"
    rate = _part(run, "throughput").get("tokens_per_second")
    return f"{said}, at {_show(rate)} tokens per second" if rate else said


def _sections(run: dict[str, Any]) -> str:
    page = ""
    for key, title in (("data", "Training data"), ("eval", "Evaluation data")):
        if data := _part(run, key):
            lengths = _part(data, "lengths").items()
            stats = {name: item for name, item in lengths if name not in ("edges", "counts")}
            facts = _facts(data | ({"lengths": stats} if stats else {}))
            page += f'<h2>{title}</h2>\n<div class="pair"><div id="{key}"></div>{facts}</div>\n'
    plugins: dict[str, Any] = {}
    for item in run.get("plugins") or ():
        options = [f"{key} = {json.dumps(value)}" for key, value in _part(item, "options").items()]
        said = [item.get("verdict") or "no verdict", item.get("origin")]
        plugins[str(item.get("name"))] = said + [", ".join(options)] * bool(options)
    if plugins:
        page += f'<h2>Plugins</h2>\n<div class="plugins">{_facts(plugins, spaced=False)}</div>\n'
    known = {key: value for key, value in run.items() if key not in NOT_FACTS}
    parts = {key: value for key, value in known.items() if isinstance(value, dict) and value}
    parts["run"] = {key: value for key, value in known.items() if key not in parts}
    page += '<h2>Setup</h2>\n<div class="facts">'
    for key, part in parts.items():
        page += f"<div><h3>{_show(key)}</h3>{_facts(part, spaced=key != 'versions')}</div>\n"
    return f"{page}</div>"
