"""The page of `plugsft bench`: one file, without scripts."""

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ...base.console import format_count
from ...output.report import fill_page
from .results import Bench
from .tables import Table, drop_empty_columns, notes, plugin_table, prepared, run_table
from .timing import Ratio

SKELETON = Path(__file__).with_name("bench.html")
TICKS = [0.001, 0.01, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10]
TICKS += [20, 50, 100, 1_000, 10_000]
MOST = 7
"""Ticks of a chart, at most."""
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
    steps = [(one.plugin, one.alone, one.company) for one in lines if one.alone or one.company]
    data = [(one.plugin, one.prepared, one.again) for one in lines if one.prepared]
    drawn = _picture("Steps", ("alone", "among the others"), steps)
    drawn += _picture("Preparing data", ("the first time", "once more"), data)
    tables = [("Each plugin", plugin_table(bench)), ("All runs", run_table(bench))]
    tables.append(("Preparing", prepared(bench)))
    told = "".join(_table(title, table) for title, table in tables if len(table) > 1)
    said = "".join(f'<p class="small">{escape(note)}</p>' for note in notes(bench))
    return f"{drawn}{told}\n<h2>How it was measured</h2>\n{said}"


def _picture(title: str, names: tuple[str, str], pairs: Sequence[Pair]) -> str:
    """Draw each plugin's two ratios with their spread, on one scale."""
    if not pairs:
        return ""
    drawn = [ratio for _, *both in pairs for ratio in both if ratio]
    scale = Scale([value for ratio in drawn for value in ratio.rounds])
    grid = "".join(f'<i style="left:{scale.place(at):.2f}%"></i>' for at in scale.ticks)
    labels = "".join(
        f'<span style="left:{scale.place(at):.2f}%">{at:g}</span>' for at in scale.ticks
    )
    rows = ""
    for plugin, *both in pairs:
        marks = "".join(
            _mark(scale, one, kind) for kind, one in zip(LANES, both, strict=True) if one
        )
        said = "".join(
            f'<span class="{kind}">{one}</span>'
            for kind, one in zip(LANES, both, strict=True)
            if one
        )
        words = "; ".join(f"{a}: {b}" for a, b in zip(names, both, strict=True) if b)
        rows += f"""<div class="row"><b>{escape(plugin)}</b>
<div class="track" role="img" aria-label="{escape(f"{plugin}: {words}")}">{grid}{marks}</div>
<p>{said}</p></div>\n"""
    keys = "".join(
        f'<span class="{kind}">{name}</span>' for kind, name in zip(LANES, names, strict=True)
    )
    return f"""<h2>{title}</h2>
<p class="legend">{keys} times as fast as without it</p>
<div class="picture">{rows}<div class="row scale"><b></b><div class="track">{labels}</div><p></p>
</div></div>\n"""


def _mark(scale: "Scale", ratio: Ratio, kind: str) -> str:
    least, middle, most = (
        scale.place(one) for one in (min(ratio.rounds), ratio.middle, max(ratio.rounds))
    )
    return (
        f'<s class="{kind}" style="left:{least:.2f}%;width:{most - least:.2f}%"></s>'
        f'<u class="{kind}" style="left:{middle:.2f}%"></u>'
    )


class Scale:
    """A scale of ratios, on which twice and half are as far from 1."""

    def __init__(self, values: Sequence[float]) -> None:
        logs = [math.log(one) for one in (*values, 0.95, 1.05)]
        room = (max(logs) - min(logs)) * 0.06
        self._least, self._most = min(logs) - room, max(logs) + room
        inside = [one for one in TICKS if self._least <= math.log(one) <= self._most]
        apart = (self._most - self._least) / MOST
        self.ticks = [1.0]
        # Away from 1 to both sides, so that none stands too near another.
        for one in sorted(inside, key=lambda value: abs(math.log(value))):
            if all(abs(math.log(one / other)) >= apart * 0.8 for other in self.ticks):
                self.ticks.append(one)

    def place(self, value: float) -> float:
        """Return where a ratio stands, in percent of the width."""
        return 100 * (math.log(value) - self._least) / (self._most - self._least)


def _whole(cell: str) -> str:
    """Write a cell; least and most stay in one line."""
    return re.sub(r"\([^()]* to [^()]*\)", r"<span>\g<0></span>", escape(cell))


def _table(title: str, table: Table) -> str:
    """Write a table; where it is narrow, each cell is named after its column."""
    head, *rows = drop_empty_columns(table)
    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(
            f'<td data-name="{escape(name)}">{_whole(cell)}</td>'
            for name, cell in zip(head[1:], row[1:], strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return f"<h2>{title}</h2>\n<table><thead><tr>{titles}</tr></thead>{body}</table>"
