"""`plugsft inspect`: show rows as the model will see them, and audit the data; also as a page."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.text import Text

from ..base.atomic import write_text
from ..base.console import format_count, out, say
from ..base.errors import DataError, RecipeError
from ..base.machine import look
from ..data.defaults import DataDefaults
from ..data.sample import make_work, sample_rows
from ..data.slices import ShardWriter
from ..data.sources import OpenSource, ensure_columns, open_source
from ..hooks import DATA
from ..output.folder import ensure_page
from ..output.report import fill_page
from ..recipe.tables import Recipe
from ..registry.active import Active, check
from .rows import Audit, audit, choose_ranges, histogram
from .tokens import InspectedRow, Piece, draw, has_colour, legend, parts, views

BAR = 40
STYLES = {"warning": "yellow"}
SKELETON = Path(__file__).with_name("inspection.html")


def inspect_data(
    recipe: Recipe,
    active: Active,
    title: str,
    rows: int = 3,
    first: int = 0,
    everything: bool = False,
    page: Path | None = None,
) -> None:
    """Show some rows of each source token by token, and audit a sample of it, or all of it."""
    if page:
        ensure_page(page, "--html")
    shown, audits = list[InspectedRow](), list[Audit]()
    with opened_rows(recipe, active) as (work, opened):
        if rows:
            out.print(legend(has_colour(out)), end="\n\n")
        for source in range(len(opened)):
            for view in views_of(work, opened, source, first, rows):
                shown.append(view)
                out.print(Text(view.title, "bold" if view.tokens else "bold red"))
                for line in draw(view.tokens, out.width, has_colour(out)):
                    out.print(line)
                say("")
            ranges = choose_ranges(len(opened[source]), everything)
            audits.append(audit(work, opened, source, active, recipe.data, ranges))
            _print_audit(audits[-1])
    if page:
        write_page(page, title, audits, shown)
        say(f"page: {page}")
    if errors := [f"{audit.name}: {error}" for audit in audits for error in audit.errors]:
        raise DataError("\n".join(errors))


@contextmanager
def opened_rows(recipe: Recipe, active: Active) -> Iterator[tuple[ShardWriter, list[OpenSource]]]:
    """Open a recipe's sources, and the writer of their tokens."""
    if not recipe.data.all_sources():
        raise RecipeError(
            f"data.tokens: {recipe.data.tokens} holds no rows to inspect; set data.source too"
        )
    active.attach(DataDefaults(recipe.folder))
    with TemporaryDirectory(prefix="plugsft-inspect-") as folder:
        # Only the data hooks: the training may be for another machine.
        check(active, recipe, look(), DATA)
        opened = [open_source(source) for source in recipe.data.all_sources()]
        ensure_columns(recipe.data, opened)
        yield make_work(recipe, active, opened, Path(folder)), opened


def views_of(
    work: ShardWriter, opened: list[OpenSource], source: int, first: int, rows: int
) -> Iterator[InspectedRow]:
    """Yield some rows of a source, token by token."""
    if not rows:
        return
    try:
        yield from views(work, source, sample_rows(work, opened, source, first, first + rows))
    except DataError as error:
        if first < len(opened[source]):
            raise
        say(f"{error}\n")


def _print_audit(result: Audit) -> None:
    """Print the facts and warnings of a source."""
    out.print(Text(f"{result.name}: {result.extent}", "bold"))
    if len(result.lengths):
        for line in _bars(histogram(result.lengths)):
            say(line)
    for label, text in result.lines:
        if label != "error":  # errors end the command
            out.print(Text.assemble((f"{label:<10} ", STYLES.get(label, "")), text))
    say("")


def _bars(bins: list[tuple[int, int, int]]) -> list[str]:
    most = max(count for *_, count in bins)
    width, count_width = len(f"{bins[-1][1]:,}"), len(f"{most:,}")
    lines = []
    for low, high, count in bins:
        span = f"{low:>{width},} - {high:>{width},}" if high > low else f"{low:>{2 * width + 3},}"
        lines.append(f"{span}  {count:>{count_width},}  " + "▇" * math.ceil(count / most * BAR))
    return lines


def write_page(
    path: Path, name: str, audits: Sequence[Audit], views: Sequence[InspectedRow]
) -> None:
    """Write the findings, and the rows that were shown, as one page."""
    sampled = sum(len(audit.sample.rows) for audit in audits)
    rows = format_count(sum(audit.total for audit in audits), "row")
    parts = {
        "name": escape(name),
        "examined": f"{sampled:,} of {rows} examined",
        "sources": "\n".join(map(_source, audits)),
        "rows": "".join(map(_row, views)),
    }
    write_text(path, fill_page(SKELETON, **parts))


def _source(audit: Audit) -> str:
    bars = "\n".join(_bars(histogram(audit.lengths))) if len(audit.lengths) else ""
    facts = "".join(
        f'<div class="{label}"><dt>{label}</dt><dd>{escape(text)}</dd></div>\n'
        for label, text in audit.lines
    )
    return f"""<h2>{escape(audit.name)}</h2>
<p class="small">{escape(audit.extent)}; examples by length in tokens:</p>
<div class="pair"><pre>{bars}</pre><dl>{facts}</dl></div>"""


def _row(view: InspectedRow) -> str:
    text = "".join(
        f'<p class="small">{name}</p><p class="tokens">{"".join(map(_token, part))}</p>'
        for name, part in parts(view.tokens)
    )
    kind = "row" if view.tokens else "row lost"
    return f"""<section class="{kind}"><h3>{escape(view.source)}, row {view.row:,}
<span>{escape(view.summary)}</span></h3>{text}</section>\n"""


def _token(piece: Piece) -> str:
    tag, ids = "b" if piece.trained else "i", " ".join(map(str, piece.ids))
    return f'<{tag} data-i="{ids}">{escape(piece.text)}</{tag}>'
