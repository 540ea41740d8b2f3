"""`plugsft inspect`: rows as the model will see them, and an audit of the data before it costs."""

import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.text import Text

from ...base.console import is_terminal, out, say
from ...base.errors import DataError, RecipeError
from ...base.machine import look
from ...data.defaults import DataDefaults
from ...data.sample import make_work, sample_rows
from ...data.slices import Work
from ...data.sources import OpenSource, ensure_columns, open_source
from ...hooks import DATA
from ...output.folder import ensure_page
from ...recipe.tables import Recipe
from ...registry.active import Active, check
from .page import write_page
from .rows import Audit, audit, histogram
from .token_view import View, views

BAR = 40
# Every other token is underlined, so that it shows where one ends.
TRAINED = ("bold green", "bold green underline")
SEEN = ("default", "underline")


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
    if not recipe.data.all_sources():
        raise RecipeError(
            f"data.tokens: {recipe.data.tokens} holds no rows to inspect; give data.source too"
        )
    if page:
        ensure_page(page, "--html")
    active.attach(DataDefaults(recipe.folder))
    shown, audits = list[View](), list[Audit]()
    with active.name_failing_plugin(), TemporaryDirectory(prefix="plugsft-inspect-") as folder:
        # A kernel that this machine cannot run is nothing to whoever looks at data.
        check(active, recipe, look(), DATA)
        opened = [open_source(source) for source in recipe.data.all_sources()]
        ensure_columns(recipe.data, opened)
        work = make_work(recipe, active, opened, Path(folder))
        if rows:
            how = "are green" if is_terminal() else "stand in [[ ]], and a · ends each token"
            say(f"trained tokens {how}\n")
        for source in range(len(opened)):
            for view in _views(work, opened, source, first, rows):
                shown.append(view)
                _show(view)
            audits.append(audit(work, opened, source, active, recipe.data, everything))
            _tell(audits[-1])
    if page:
        write_page(page, title, audits, shown)
        say(f"page: {page}")
    if errors := [f"{one.name}: {error}" for one in audits for error in one.errors]:
        raise DataError("\n".join(errors))


def _views(
    work: Work, opened: list[OpenSource], source: int, first: int, rows: int
) -> Iterator[View]:
    if not rows:
        return
    try:
        yield from views(work, source, sample_rows(work, opened, source, first, first + rows))
    except DataError as error:
        if first < len(opened[source]):
            raise
        say(f"{error}\n")


def _show(view: View) -> None:
    if not view.pieces:
        out.print(Text(f"{view.title}\n", "bold red"))
        return
    out.print(Text(view.title, "bold"))
    text = _paint(view) if is_terminal() else _mark(view)
    out.print(text, end="\n" if text.plain.endswith("\n") else "\n\n")


def _paint(view: View) -> Text:
    painted = Text()
    for number, piece in enumerate(view.pieces):
        painted.append(piece.text, (TRAINED if piece.trained else SEEN)[number % 2])
    return painted


def _mark(view: View) -> Text:
    marked, inside = "", False
    for piece in view.pieces:
        if piece.trained != inside:
            marked += " [[" if piece.trained else "]] "
            inside = not inside
        marked += piece.text[:-1] + "·\n" if piece.text.endswith("\n") else piece.text + "·"
    return Text(marked + ("]]" if inside else ""))


def _tell(found: Audit) -> None:
    """Say what a sample is like."""
    out.print(Text(f"{found.name}: {found.looked}", "bold"))
    if len(found.lengths):
        for line in _bars(histogram(found.lengths)):
            say(line)
    for label, words in found.facts:
        say(f"{label:<11}{words}")
    for warning in found.warnings:
        out.print(Text.assemble(("warning    ", "yellow"), warning))
    say("")


def _bars(bins: list[tuple[int, int, int]]) -> list[str]:
    most = max(count for *_, count in bins)
    wide, high = len(f"{bins[-1][1]:,}"), len(f"{most:,}")
    lines = []
    for low, up, count in bins:
        span = f"{low:>{wide},} - {up:>{wide},}" if up > low else f"{low:>{2 * wide + 3},}"
        lines.append(f"{span}  {count:>{high},}  " + "▇" * math.ceil(count / most * BAR))
    return lines
