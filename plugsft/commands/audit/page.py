"""The page of `plugsft inspect`: needs nothing but a browser, and runs nothing in it."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ...base.console import format_count
from ...output.report import fill_page
from .rows import Audit, histogram, quantiles
from .token_view import Piece, View

SKELETON = Path(__file__).with_name("inspection.html")
MOST = 100_000
"""Tokens that are drawn: some forty bytes each."""


def write_page(path: Path, name: str, audits: Sequence[Audit], views: Sequence[View]) -> None:
    """Write what was found, and the rows that were shown, as one page."""
    parts = {
        "name": escape(name),
        "head": _head(name, audits),
        "sources": "\n".join(map(_source, audits)),
        "rows": _rows(views),
    }
    path.write_text(fill_page(SKELETON, **parts), "utf-8", errors="replace")


def _head(name: str, audits: Sequence[Audit]) -> str:
    found = [("error", one.name, text) for one in audits for text in one.errors]
    found += [("warning", one.name, text) for one in audits for text in one.warnings]
    kinds = [kind for kind, *_ in found]
    counts = [
        format_count(kinds.count(kind), kind) for kind in ("error", "warning") if kind in kinds
    ]
    status, mark = " and ".join(counts) or "nothing to mend", kinds[0] if found else "good"
    items = "".join(
        f'<li class="{kind}"><b>{kind}</b><span>{escape(where)}</span>{escape(text)}</li>\n'
        for kind, where, text in found
    )
    looked = sum(len(one.sample.rows) for one in audits)
    rows = format_count(sum(one.total for one in audits), "row")
    tokens = sum(one.sample.shard.tokens for one in audits)
    trained = sum(one.sample.shard.trained for one in audits)
    share = f", {trained / tokens:.0%} of them trained on" if tokens else ""
    return f"""<p class="meta"><span class="status {mark}">{status}</span></p>
<h1>{escape(name)}</h1>
<p class="result">{looked:,} of {rows} looked at: {format_count(tokens, "token")}{share}.</p>
<ul class="findings">{items}</ul>"""


def _source(found: Audit) -> str:
    tables = _histogram(found) + _quantiles(found) if len(found.lengths) else ""
    facts = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(words)}</dd></div>\n"
        for label, words in found.facts
        if label != "lengths"
    )
    return f"""<h2>{escape(found.name)}</h2>
<p class="small">{escape(found.looked)}</p>
<div class="pair"><div>{tables}</div><dl>{facts}</dl></div>"""


def _histogram(found: Audit) -> str:
    bins = histogram(found.lengths)
    most = max(count for *_, count in bins)
    rows = "".join(
        _bar(f"{low:,} - {up:,}" if up > low else f"{low:,}", n, n / most, low > found.max_length)
        for low, up, n in bins
    )
    return f"<table><caption>Examples by their tokens</caption>{rows}</table>\n"


def _quantiles(found: Audit) -> str:
    known, limit = quantiles(found.lengths), found.max_length
    widest = max(known["longest"], limit)
    rows = "".join(
        _bar(name, length, length / widest, length > limit) for name, length in known.items()
    )
    return f"""<table class="track"><caption>Tokens at most, of so many examples
<span>(max_length is {limit:,})</span></caption>{rows}</table>"""


def _bar(label: str, count: int, share: float, over: bool) -> str:
    bar = f'<i style="width:{share:.2%}"></i>' if count else ""
    return (
        f'<tr class="{"over" if over else ""}"><th>{label}</th><td>{count:,}</td>'
        f"<td><div>{bar}</div></td></tr>\n"
    )


def _rows(views: Sequence[View]) -> str:
    drawn, left = "", MOST
    for view in views:
        pieces = view.pieces[: max(0, left)]
        left -= len(pieces)
        text = f'<p class="tokens">{"".join(map(_token, pieces))}</p>' if pieces else ""
        if more := len(view.pieces) - len(pieces):
            text += f'<p class="small">and {more:,} more</p>'
        kind = "row" if view.pieces else "row lost"
        drawn += f"""<section class="{kind}"><h3>{escape(view.source)}, row {view.row:,}
<span>{escape(view.said)}</span></h3>{text}</section>\n"""
    if not drawn:
        return ""
    return f"""<h2>Rows</h2>
<p class="small legend"><b>trained</b><i>not trained</i> Every other token is shaded; point at one
for its number in the vocabulary.</p>
{drawn}"""


def _token(piece: Piece) -> str:
    tag, ids = "b" if piece.trained else "i", " ".join(map(str, piece.ids))
    return f'<{tag} data-i="{ids}">{escape(piece.text)}</{tag}>'
