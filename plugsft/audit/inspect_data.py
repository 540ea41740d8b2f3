"""`plugsft inspect`: show rows as the model will see them, and audit the data."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.text import Text

from ..base.console import out, say
from ..base.errors import DataError, RecipeError
from ..base.machine import look
from ..data.defaults import DataDefaults
from ..data.sample import make_work, sample_rows
from ..data.slices import ShardWriter
from ..data.sources import OpenSource, ensure_columns, open_source
from ..hooks import DATA
from ..output.folder import ensure_page
from ..recipe.tables import Recipe
from ..registry.active import Active, check
from .page import write_page
from .rows import Audit, audit, histogram
from .token_lines import draw, has_colour, legend
from .token_view import InspectedRow, views

BAR = 40
STYLES = {"warning": "yellow"}


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
                _print_view(view)
            audits.append(audit(work, opened, source, active, recipe.data, everything))
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
    with active.name_failing_plugin(), TemporaryDirectory(prefix="plugsft-inspect-") as folder:
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


def _print_view(view: InspectedRow) -> None:
    out.print(Text(view.title, "bold" if view.tokens else "bold red"))
    for line in draw(view.tokens, out.width, has_colour(out)):
        out.print(line)
    say("")


def _print_audit(result: Audit) -> None:
    """Print the facts and warnings of a source."""
    out.print(Text(f"{result.name}: {result.extent}", "bold"))
    if len(result.lengths):
        for line in _bars(histogram(result.lengths)):
            say(line)
    for label, text in result.lines:
        if label != "error":  # errors end the command
            out.print(Text.assemble((f"{label:<11}", STYLES.get(label, "")), text))
    say("")


def _bars(bins: list[tuple[int, int, int]]) -> list[str]:
    most = max(count for *_, count in bins)
    width, count_width = len(f"{bins[-1][1]:,}"), len(f"{most:,}")
    lines = []
    for low, high, count in bins:
        span = f"{low:>{width},} - {high:>{width},}" if high > low else f"{low:>{2 * width + 3},}"
        lines.append(f"{span}  {count:>{count_width},}  " + "▇" * math.ceil(count / most * BAR))
    return lines
