"""The page of `plugsft diff`: the differences, and the curves of both runs in one chart."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...output.report import Points, curves_of, fill, table_of
from .compare import Row, Run, Section


def write_page(path: Path, a: Run, b: Run, sections: Sequence[Section]) -> None:
    """Write the differences of two runs as one page that needs only a browser."""
    *compared, results = sections
    title = " and ".join(escape(run.folder.absolute().name) for run in (a, b))
    page = fill(title, _head(title, a, b, results), _tables(compared), _numbers(a, b))
    path.write_text(page, "utf-8", errors="replace")


def _numbers(a: Run, b: Run) -> dict[str, Any]:
    """Return both runs' curves; a chart has both curves of a metric."""
    series: dict[str, Points] = {}
    together: dict[str, tuple[str, str, bool]] = {}
    for key in dict.fromkeys([*a.series, *b.series]):
        for run in (run for run in (a, b) if key in run.series):
            series[f"{key} {run.name}"] = run.series[key]
            chart = key.removeprefix("eval_")
            together[f"{chart} {run.name}"] = (chart, run.name, run is b)
    epochs = [table_of(run.facts, "steps").get("per_epoch") for run in (a, b)]
    steps = {"per_epoch": epochs[0]} if epochs[0] == epochs[1] else {}
    return {**curves_of(series), "together": together, "parts": {"steps": steps}}


def _head(title: str, a: Run, b: Run, results: Section) -> str:
    runs = "".join(
        f"<div><dt>{run.name}</dt><dd>{escape(str(run.folder))}</dd><dd>{escape(run.state)}</dd></div>"
        for run in (a, b)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in a.notes + b.notes)
    return f"""<h1>{title}</h1>
<dl class="runs">{runs}</dl>
{f'<div class="note">{notes}</div>' if notes else ""}
<h2>Results</h2>
{_table(results)}"""


def _tables(sections: Sequence[Section]) -> str:
    same = ", ".join(section.title for section in sections if section.same)
    different = [section for section in sections if not section.same]
    tables = "\n".join(_table(section, section.title) for section in different)
    note = f'<p class="small">The same: {escape(same)}.</p>' if same else ""
    return f"<h2>Differences</h2>\n{tables or '<p>None.</p>'}\n{note}"


def _table(section: Section, title: str = "") -> str:
    rows = "".join(map(_row, section.rows))
    lines = "".join(f'<p class="small">{escape(line)}</p>' for line in section.lines)
    caption = f"<h3>{escape(title)}</h3>" if title else ""
    head = "<tr><th></th><td>A</td><td>B</td><td></td></tr>"
    return f'{caption}<table class="diff">{head}{rows}</table>{lines}' if rows else caption + lines


def _row(row: Row) -> str:
    values = "".join(f"<td>{escape(text)}</td>" for text in (row.a, row.b, row.change))
    return f'<tr><th scope="row">{escape(row.name)}</th>{values}</tr>\n'
