"""The page of `plugsft diff`: what differs, and the curves of both runs over each other."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...output.report import Points, curves_of, fill, table_of
from .compare import Row, Run, Section


def write_page(path: Path, a: Run, b: Run, sections: Sequence[Section]) -> None:
    """Write what differs between two runs as one page that needs nothing but a browser."""
    *told, results = sections
    title = " and ".join(escape(run.folder.absolute().name) for run in (a, b))
    page = fill(title, _head(title, a, b, results), _tables(told), _numbers(a, b))
    path.write_text(page, "utf-8", errors="replace")


def _numbers(a: Run, b: Run) -> dict[str, Any]:
    """Return both runs' curves; a picture has the two of a quantity, in colours of their own."""
    series: dict[str, Points] = {}
    together: dict[str, tuple[str, str, bool]] = {}
    for key in dict.fromkeys([*a.series, *b.series]):
        for run in (one for one in (a, b) if key in one.series):
            series[f"{key} {run.name}"] = run.series[key]
            place = key.removeprefix("eval_")
            together[f"{place} {run.name}"] = (place, run.name, run is b)
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


def _tables(told: Sequence[Section]) -> str:
    same = ", ".join(one.title for one in told if one.same)
    tables = "\n".join(_table(one, one.title) for one in told if not one.same)
    said = f'<p class="small">The same: {escape(same)}.</p>' if same else ""
    return f"<h2>What differs</h2>\n{tables or '<p>Nothing.</p>'}\n{said}"


def _table(section: Section, title: str = "") -> str:
    rows = "".join(map(_row, section.rows))
    lines = "".join(f'<p class="small">{escape(line)}</p>' for line in section.lines)
    caption = f"<h3>{escape(title)}</h3>" if title else ""
    head = "<tr><th></th><td>A</td><td>B</td><td></td></tr>"
    return f'{caption}<table class="diff">{head}{rows}</table>{lines}' if rows else caption + lines


def _row(row: Row) -> str:
    values = "".join(f"<td>{escape(text)}</td>" for text in (row.a, row.b, row.change))
    return f'<tr><th scope="row">{escape(row.name)}</th>{values}</tr>\n'
