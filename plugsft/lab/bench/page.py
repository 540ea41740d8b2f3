"""The page of `plugsft bench`: one file, without scripts."""

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ...base.console import format_count
from ...output.report import fill_page
from .results import Bench
from .tables import Table, drop_empty_columns, notes, plugin_table, preparation_table, run_table
from .timing import Ratio

SKELETON = Path(__file__).with_name("bench.html")
TICKS = [0.001, 0.01, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10]
TICKS += [20, 50, 100, 1_000, 10_000]
MAX_TICKS = 7
Pair = tuple[str, Ratio | None, Ratio | None]
"""A plugin and its two ratios."""
LANES = ("first", "second")
STATES = {"complete": "good", "running": "care", "stopped": "care"}


def write_page(path: Path, bench: Bench) -> None:
    """Write the page of a bench."""
    name = escape(str(bench.report["name"]))
    page = fill_page(SKELETON, name=name, head=_head(bench), sections=_sections(bench))
    path.write_text(page, "utf-8", errors="replace")


def _head(bench: Bench) -> str:
    status = str(bench.report["status"])
    date = str(bench.report["date"])[:16].replace("T", " ")
    name, count = escape(str(bench.report["name"])), format_count(len(bench.measured), "plugin")
    rounds = format_count(len(bench.report["rounds"]) or len(bench.report["preparations"]), "round")
    return f"""<p class="meta"><span class="status {STATES[status]}">{status}</span>
<time>{date}</time></p>
<h1>What the plugins of {name} bring</h1>
<p class="result">{count}, each alone and left out, in {rounds}
of fresh processes.</p>"""


def _sections(bench: Bench) -> str:
    lines = list(bench.lines())
    steps = [
        (line.plugin, line.alone, line.company) for line in lines if line.alone or line.company
    ]
    data = [(line.plugin, line.prepared, line.again) for line in lines if line.prepared]
    pictures = _picture("Steps", ("alone", "among the others"), steps)
    pictures += _picture("Preparing data", ("the first time", "again"), data)
    tables = [("Each plugin", plugin_table(bench)), ("All runs", run_table(bench))]
    tables.append(("Preparing", preparation_table(bench)))
    drawn = "".join(_table(title, table) for title, table in tables if len(table) > 1)
    paragraphs = "".join(f'<p class="small">{escape(note)}</p>' for note in notes(bench))
    return f"{pictures}{drawn}\n<h2>How it was measured</h2>\n{paragraphs}"


def _picture(title: str, names: tuple[str, str], pairs: Sequence[Pair]) -> str:
    """Draw each plugin's two ratios with their spread, on one scale."""
    if not pairs:
        return ""
    ratios = [ratio for _, *both in pairs for ratio in both if ratio]
    scale = Scale([value for ratio in ratios for value in ratio.rounds])
    grid = "".join(f'<i style="left:{scale.place(at):.2f}%"></i>' for at in scale.ticks)
    ticks = "".join(
        f'<span style="left:{scale.place(at):.2f}%">{at:g}</span>' for at in scale.ticks
    )
    rows = ""
    for plugin, *both in pairs:
        lanes = [(lane, ratio) for lane, ratio in zip(LANES, both, strict=True) if ratio]
        marks = "".join(_mark(scale, ratio, lane) for lane, ratio in lanes)
        labels = "".join(f'<span class="{lane}">{ratio}</span>' for lane, ratio in lanes)
        words = "; ".join(f"{a}: {b}" for a, b in zip(names, both, strict=True) if b)
        rows += f"""<div class="row"><b>{escape(plugin)}</b>
<div class="track" role="img" aria-label="{escape(f"{plugin}: {words}")}">{grid}{marks}</div>
<p>{labels}</p></div>\n"""
    keys = "".join(
        f'<span class="{lane}">{name}</span>' for lane, name in zip(LANES, names, strict=True)
    )
    return f"""<h2>{title}</h2>
<p class="legend">{keys} times as fast as without it</p>
<div class="picture">{rows}<div class="row scale"><b></b><div class="track">{ticks}</div><p></p>
</div></div>\n"""


def _mark(scale: "Scale", ratio: Ratio, lane: str) -> str:
    least, median, most = (
        scale.place(value) for value in (min(ratio.rounds), ratio.middle, max(ratio.rounds))
    )
    return (
        f'<s class="{lane}" style="left:{least:.2f}%;width:{most - least:.2f}%"></s>'
        f'<u class="{lane}" style="left:{median:.2f}%"></u>'
    )


class Scale:
    """A logarithmic scale of ratios: twice and half are equally far from 1."""

    def __init__(self, values: Sequence[float]) -> None:
        logs = [math.log(value) for value in (*values, 0.95, 1.05)]
        margin = (max(logs) - min(logs)) * 0.06
        self._least, self._most = min(logs) - margin, max(logs) + margin
        inside = [tick for tick in TICKS if self._least <= math.log(tick) <= self._most]
        distance = (self._most - self._least) / MAX_TICKS
        self.ticks = [1.0]
        # From 1 to both sides; a tick too near another is left out.
        for tick in sorted(inside, key=lambda value: abs(math.log(value))):
            if all(abs(math.log(tick / other)) >= distance * 0.8 for other in self.ticks):
                self.ticks.append(tick)

    def place(self, value: float) -> float:
        """Return the position of a ratio, in percent of the width."""
        return 100 * (math.log(value) - self._least) / (self._most - self._least)


def _cell(cell: str) -> str:
    """Write a cell; minimum and maximum stay in one line."""
    return re.sub(r"\([^()]* to [^()]*\)", r"<span>\g<0></span>", escape(cell))


def _table(title: str, table: Table) -> str:
    """Write a table; on narrow screens each cell shows its column's name."""
    head, *rows = drop_empty_columns(table)
    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(
            f'<td data-name="{escape(name)}">{_cell(cell)}</td>'
            for name, cell in zip(head[1:], row[1:], strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return f"<h2>{title}</h2>\n<table><thead><tr>{titles}</tr></thead>{body}</table>"
