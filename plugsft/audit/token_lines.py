"""Rows in the terminal: trained tokens in shades, or underlined."""

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ..base.console import out
from .token_view import Piece, parts

# Two shades each, so that neighbouring tokens differ. Both have their own text colour, so that
# they are legible on a dark terminal and on a light one.
TRAINED = ("color(16) on color(78)", "color(16) on color(157)")
SEEN = ("default", "dim")
UNDERLINES = dict(zip(TRAINED, "^~", strict=True))
SPACES = re.compile(r"(?<![^ \n⏎]) | (?![^ \n⏎])")
"""Spaces at an edge of the line, and neighbouring ones."""
INDENT = " " * 10
LEAST_WIDTH = 20


def has_colour(console: Console) -> bool:
    """Tell whether a console shows shades: not pipes, logs, or terminals of 16 colours."""
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
    """Return marks below the trained tokens of a line."""
    marks = [" "] * len(line)
    for start, end, style in line.spans:
        if mark := UNDERLINES.get(str(style)):
            marks[start:end] = mark * (end - start)
    widths = map(cell_len, line.plain)
    return "".join(mark * width for mark, width in zip(marks, widths, strict=True)).rstrip()
