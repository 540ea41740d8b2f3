"""Rows in the terminal: trained tokens in shades, or underlined."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from .token_view import Piece, parts

# Two shades each, so that neighbouring tokens differ. Both have their own text colour, so that
# they are legible on a dark terminal and on a light one.
TRAINED = ("color(16) on color(78)", "color(16) on color(157)")
SEEN = ("default", "dim")
UNDERLINES = "^~"
INDENT = " " * 10
LEAST_WIDTH = 20

Cells = list["Cell"]


class Cell(NamedTuple):
    """A character with its combining marks, and the number of its token."""

    text: str
    token: int

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return cell_len(self.text)


def has_colour(console: Console) -> bool:
    """Tell whether a console shows shades: not pipes, logs, or terminals of 16 colours."""
    return console.color_system in ("256", "truecolor") and not console.no_color


def legend(colour: bool) -> Text:
    """Explain the marks."""
    signs = "  ⏎ newline  ⇥ tab  ␣ extra space"
    if not colour:
        return Text(f"trained tokens: underlined, ^ and ~ in turn.{signs}")
    trained = [(word, TRAINED[n % 2]) for n, word in enumerate(("trained", " tokens"))]
    seen = [(word, SEEN[n % 2]) for n, word in enumerate(("not", " trained"))]
    return Text.assemble(*trained, "  ", *seen, "  ", ("special tokens", "bold"), signs)


def draw(pieces: Sequence[Piece], width: int, colour: bool) -> Iterator[Text]:
    """Yield the lines of an example, at most `width` columns wide: prompts and answers by name."""
    room = max(LEAST_WIDTH, width - len(INDENT))
    for name, part in parts(pieces):
        label = f"  {name:<8}"
        for full_line in split_lines(part):
            for line in wrap(full_line, room):
                yield Text(label).append_text(paint(line, part, colour))
                label = INDENT
                if not colour and (underlines := underline(line, part)):
                    yield Text(INDENT + underlines)


def split_lines(pieces: Sequence[Piece]) -> Iterator[Cells]:
    """Yield the cells of each line of the text."""
    line = Cells()
    for token, piece in enumerate(pieces):
        for character in piece.text:
            if character == "\n":
                yield show_spaces(line)
                line = []
            elif line and line[-1].token == token and not cell_len(character):
                line[-1] = Cell(line[-1].text + character, token)
            else:
                line.append(Cell(character, token))
    if line:
        yield show_spaces(line)


def show_spaces(line: Cells) -> Cells:
    """Draw spaces at an edge of the line, and neighbouring ones."""
    texts = [" ", *(cell.text for cell in line), " "]
    texts = [" " if text == "⏎" else text for text in texts]
    return [
        Cell("␣", cell.token) if cell.text == " " in (texts[n], texts[n + 2]) else cell
        for n, cell in enumerate(line)
    ]


def wrap(line: Cells, width: int) -> Iterator[Cells]:
    """Break a line, between tokens where one fits a line."""
    start, used = 0, 0
    for place, cell in enumerate(line):
        if used + cell.width > width:
            first = place
            while first > start and line[first - 1].token == cell.token:
                first -= 1
            stop = first if first > start else place
            yield line[start:stop]
            start, used = stop, sum(cell.width for cell in line[stop:place])
        used += cell.width
    yield line[start:]


def paint(line: Cells, pieces: Sequence[Piece], colour: bool) -> Text:
    """Colour the tokens of a line."""
    text = Text()
    for cell in line:
        piece = pieces[cell.token]
        shade = (TRAINED if piece.trained else SEEN)[cell.token % 2]
        special = "bold " if piece.special else ""
        text.append(cell.text, f"{special}{shade}" if colour else "")
    return text


def underline(line: Cells, pieces: Sequence[Piece]) -> str:
    """Return marks below the trained tokens of a line."""
    marks = (
        (UNDERLINES[cell.token % 2] if pieces[cell.token].trained else " ") * cell.width
        for cell in line
    )
    return "".join(marks).rstrip()
