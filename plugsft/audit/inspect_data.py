"""`plugsft inspect`: rows as the model will see them, and an audit of the data; also as a page."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..base.atomic import write_text
from ..base.console import format_count, out, say
from ..base.errors import DataError, RecipeError
from ..base.machine import look
from ..data.defaults import DataDefaults
from ..data.examples import WEIGHTLESS, turns_of
from ..data.sample import make_work, sample_rows
from ..data.slices import ShardWriter
from ..data.sources import OpenSource, ensure_columns, open_source
from ..hooks import DATA
from ..output.folder import ensure_page
from ..output.report import fill_page
from ..recipe.tables import Recipe
from ..registry.active import Active
from ..start.checks import Case, ensure
from .rows import Audit, audit, choose_ranges, histogram

BAR = 40
STYLES = {"warning": "yellow"}
SKELETON = Path(__file__).with_name("inspection.html")
NO_TOKEN = "no trained token within data.max_length"
SHADE = "background:rgba(60,160,80,.3)"
"""The style of trained tokens in a notebook, on light and dark pages."""
SIGNS = {"\n": "⏎\n", "\t": "⇥"}
# Two shades each, so that neighbouring tokens differ. Both have their own text colour, so that
# they are legible on a dark terminal and on a light one.
TRAINED = ("color(16) on color(78)", "color(16) on color(157)")
SEEN = ("default", "dim")
UNDERLINES = dict(zip(TRAINED, "^~", strict=True))
SPACES = re.compile(r"(?<![^ \n⏎]) | (?![^ \n⏎])")
"""Spaces at an edge of the line, and neighbouring ones."""
INDENT = " " * 10
LEAST_WIDTH = 20


class Piece(NamedTuple):
    """A token, or several that share a character."""

    text: str
    ids: list[int]
    trained: bool
    special: bool = False
    """Whether it is a special token, and no text that looks like one."""


@dataclass
class InspectedRow:
    """A row as the model will see it, or one of its examples."""

    source: str
    row: int
    """Its number in the source; the first is 0."""
    summary: str
    """Its tokens in short, or why it cannot be used."""
    tokens: list[Piece] = field(default_factory=list)
    """Empty if the row cannot be used."""

    @property
    def title(self) -> str:
        """The row's source and number, and its summary."""
        return f"{self.source}, row {self.row + 1:,}: {self.summary}"

    @property
    def trained_text(self) -> str:
        """The text that the model learns to write; ⏎ marks a newline."""
        return "".join(token.text for token in self.tokens if token.trained)

    def __str__(self) -> str:
        text = "".join(f"[{token.text}]" if token.trained else token.text for token in self.tokens)
        return f"{self.title}\n{text}"

    def _repr_html_(self) -> str:
        tokens = "".join(
            f"<span title='{token.ids}' style='{SHADE if token.trained else ''}'>"
            f"{escape(token.text)}</span>"
            for token in self.tokens
        )
        title = escape(self.title)
        return f"<p><b>{title}</b></p><pre style='white-space:pre-wrap'>{tokens}</pre>"


def views_of(
    work: ShardWriter, opened: list[OpenSource], source: int, first: int, rows: int
) -> Iterator[InspectedRow]:
    """Yield some rows of a source, token by token."""
    if not rows:
        return
    try:
        sample = sample_rows(work, opened, source, first, first + rows)
    except DataError as error:
        if first < len(opened[source]):
            raise
        say(f"{error}\n")
        return
    shard, tokens = sample.shard, sample.tokens
    name = work.sources[source].source
    unusable = {row: reason for reason, numbers in shard.bad.items() for row in numbers}
    unusable |= dict.fromkeys(shard.too_long, "too long")
    weightless = shard.warnings.get(WEIGHTLESS, {"rows": ()})["rows"]
    for row in sample.rows:
        examples = np.flatnonzero(tokens.rows == row).tolist()
        if not examples:
            why = f"cannot be used: {unusable.get(row, NO_TOKEN)}"
            yield InspectedRow(name, row, WEIGHTLESS if row in weightless else why)
        for number, example in enumerate(examples, 1):
            ids, trained = tokens.example(example)
            cut = row in shard.truncated and len(ids) >= work.data.max_length
            summary = ""
            if len(examples) > 1:
                turns = format_count(len(turns_of(trained)[0]), "turn")
                summary = f"example {number:,} of {len(examples):,}, {turns}, "
            summary += f"{len(ids):,} tokens, {trained.sum():,} trained ({trained.mean():.0%})"
            summary += ", truncated" if cut else ""
            summary += ", chosen before rejected" if tokens.facts["pairs"] else ""
            row_pieces = pieces(work.tokenizer.backend_tokenizer, ids, trained)
            yield InspectedRow(name, row, summary, list(row_pieces))


def pieces(
    tokenizer: Tokenizer, ids: NDArray[np.int32], trained: NDArray[np.bool_]
) -> Iterator[Piece]:
    """Yield each token's text; tokens that share a character are one piece."""
    added = tokenizer.get_added_tokens_decoder()
    stream, waiting = DecodeStream(skip_special_tokens=False), list[int]()
    for place, token in enumerate(ids.tolist()):
        waiting.append(token)
        text = stream.step(tokenizer, token)
        if text is not None or place == len(ids) - 1:
            visible = "\ufffd" if text is None else make_visible(text)
            special = token in added and added[token].special
            yield Piece(visible, waiting, bool(trained[place + 1 - len(waiting)]), special)
            waiting = []


def parts(pieces: Sequence[Piece]) -> Iterator[tuple[str, list[Piece]]]:
    """Yield the prompts and answers of an example, with their names."""
    if any(piece.trained for piece in pieces[:2]):
        yield "text", [*pieces]  # all is trained but the first token, which never is
        return
    name, part = "prompt", list[Piece]()
    for piece in pieces:
        new = "answer" if piece.trained else "prompt"
        # A newline behind an answer is drawn with it, though it is not trained.
        if new != name and (piece.trained or piece.text != "⏎\n"):
            yield name, part
            name, part = new, []
        part.append(piece)
    yield name.replace("prompt", "rest"), part


def make_visible(text: str) -> str:
    """Escape characters that are invisible or control a terminal."""
    # A token that begins with a combining mark would be drawn on the token before.
    base = "◌" if text and not cell_len(text[0]) and text[0].isprintable() else ""
    return base + "".join(
        SIGNS.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode())
        for c in text
    )


def has_colour(console: Console) -> bool:
    """Whether a console shows shades: not pipes, logs, or terminals of 16 colours."""
    return console.color_system in ("256", "truecolor") and not console.no_color


def legend(colour: bool) -> Text:
    """Explain the marks."""
    signs = "  ⏎ newline  ⇥ tab  ␣ extra space"
    if not colour:
        return Text(f"trained tokens: underlined, ^ and ~ in turn.{signs}")
    trained, seen = ("trained tokens", TRAINED[0]), ("not trained", SEEN[1])
    return Text.assemble(trained, "  ", seen, "  ", ("special tokens", "bold"), signs)


def draw(pieces: Sequence[Piece], width: int, colour: bool) -> Iterator[Text]:
    """Yield the lines of an example, at most `width` columns wide: prompts and answers by name."""
    room = max(LEAST_WIDTH, width - len(INDENT))
    for name, part in parts(pieces):
        label = f"  {name:<8}"
        for line in paint(part).wrap(out, room, overflow="fold"):
            yield Text(label).append_text(line if colour else Text(line.plain))
            label = INDENT
            if not colour and (underlines := underline(line)):
                yield Text(INDENT + underlines)


def paint(pieces: Sequence[Piece]) -> Text:
    """Colour the tokens of a text."""
    whole, start = "".join(piece.text for piece in pieces), 0
    text = Text(SPACES.sub("␣", whole).removesuffix("\n"))
    for number, piece in enumerate(pieces):
        end = start + len(piece.text)
        text.stylize((TRAINED if piece.trained else SEEN)[number % 2], start, end)
        text.stylize("bold" if piece.special else "", start, end)
        start = end
    return text


def underline(line: Text) -> str:
    """Marks below the trained tokens, for consoles without shades."""
    marks = [" "] * len(line)
    for start, end, style in line.spans:
        if mark := UNDERLINES.get(str(style)):
            marks[start:end] = mark * (end - start)
    widths = map(cell_len, line.plain)
    return "".join(mark * width for mark, width in zip(marks, widths, strict=True)).rstrip()


def inspect_data(
    recipe: Recipe,
    active: Active,
    title: str,
    rows: int,
    first: int,
    everything: bool,
    page: Path | None,
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
        ensure(Case(recipe, active, look(), hooks=DATA), "plugins", "model")
        opened = [open_source(source) for source in recipe.data.all_sources()]
        ensure_columns(recipe.data, opened)
        yield make_work(recipe, active, opened, Path(folder)), opened


def _print_audit(result: Audit) -> None:
    """Print the facts and warnings of a source."""
    out.print(Text(f"{result.name}: {result.extent}", "bold"))
    for line in _bars(result):
        say(line)
    for label, text in result.lines:
        if label != "error":  # errors end the command
            out.print(Text.assemble((f"{label:<10} ", STYLES.get(label, "")), text))
    say("")


def _bars(audit: Audit) -> list[str]:
    """Draw how many examples have which length."""
    if not len(audit.lengths):
        return []
    bins, lines = histogram(audit.lengths, audit.longest), list[str]()
    most = max(count for *_, count in bins)
    width, count_width = len(f"{bins[-1][1]:,}"), len(f"{most:,}")
    for low, high, count in bins:
        span = f"{low:>{width},} - {high:>{width},}" if high > low else f"{low:>{2 * width + 3},}"
        bar = "▇" * math.ceil(count / most * BAR) + " too long" * (low > audit.longest)
        lines.append(f"{span}  {count:>{count_width},}  {bar}")
    return lines


def write_page(
    path: Path, name: str, audits: Sequence[Audit], views: Sequence[InspectedRow]
) -> None:
    """Write the findings, and the rows that were shown, as one page."""
    sampled = sum(len(audit.sample.rows) for audit in audits)
    rows = format_count(sum(len(audit.rows) for audit in audits), "row")
    page = fill_page(
        SKELETON,
        name=name,
        examined=f"{sampled:,} of {rows} examined",
        audits=audits,
        bars=_bars,
        views=views,
        parts=parts,
    )
    write_text(path, page)
