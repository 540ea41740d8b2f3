"""The page of `plugsft inspect`: one file, without scripts."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..base.console import format_count
from ..output.report import fill_page
from .rows import Audit, histogram
from .token_view import InspectedRow, Piece, parts

SKELETON = Path(__file__).with_name("inspection.html")
MAX_TOKENS = 100_000
"""Tokens that are drawn; each takes about 40 bytes."""


def write_page(
    path: Path, name: str, audits: Sequence[Audit], views: Sequence[InspectedRow]
) -> None:
    """Write the findings, and the rows that were shown, as one page."""
    parts = {
        "name": escape(name),
        "head": _head(name, audits),
        "sources": "\n".join(map(_source, audits)),
        "rows": _rows(views),
    }
    path.write_text(fill_page(SKELETON, **parts), "utf-8", errors="replace")


def _head(name: str, audits: Sequence[Audit]) -> str:
    sampled = sum(len(audit.sample.rows) for audit in audits)
    rows = format_count(sum(audit.total for audit in audits), "row")
    return f'<h1>{escape(name)}</h1>\n<p class="result">{sampled:,} of {rows} examined.</p>'


def _source(audit: Audit) -> str:
    tables = _histogram(audit) if len(audit.lengths) else ""
    facts = "".join(
        f'<div class="{label}"><dt>{label}</dt><dd>{escape(text)}</dd></div>\n'
        for label, text in audit.lines
    )
    return f"""<h2>{escape(audit.name)}</h2>
<p class="small">{escape(audit.extent)}</p>
<div class="pair"><div>{tables}</div><dl>{facts}</dl></div>"""


def _histogram(audit: Audit) -> str:
    bins = histogram(audit.lengths)
    most = max(count for *_, count in bins)
    rows = "".join(
        f'<tr class="{"over" if low > audit.max_length else ""}">'
        f"<th>{low:,}{f' - {up:,}' if up > low else ''}</th><td>{count:,}</td>"
        f'<td><div><i style="width:{count / most:.2%}"></i></div></td></tr>\n'
        for low, up, count in bins
    )
    return f"<table><caption>Examples by length in tokens</caption>{rows}</table>\n"


def _rows(views: Sequence[InspectedRow]) -> str:
    html, left = "", MAX_TOKENS
    for view in views:
        pieces = view.tokens[: max(0, left)]
        left -= len(pieces)
        text = "".join(
            f'<p class="small">{name}</p><p class="tokens">{"".join(map(_token, part))}</p>'
            for name, part in parts(pieces)
            if part
        )
        if more := len(view.tokens) - len(pieces):
            text += f'<p class="small">and {more:,} more</p>'
        kind = "row" if view.tokens else "row lost"
        html += f"""<section class="{kind}"><h3>{escape(view.source)}, row {view.row:,}
<span>{escape(view.summary)}</span></h3>{text}</section>\n"""
    if not html:
        return ""
    return f"""<h2>Rows</h2>
<p class="small legend"><b>trained</b><i>not trained</i> Every other token is shaded; point at a
token to see its id.</p>
{html}"""


def _token(piece: Piece) -> str:
    tag, ids = "b" if piece.trained else "i", " ".join(map(str, piece.ids))
    return f'<{tag} data-i="{ids}">{escape(piece.text)}</{tag}>'
