"""Rows as tokens: pieces of text with ids and labels, and the lines that show them."""

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..base.console import out
from ..data.sample import Sample
from ..data.slices import ShardWriter

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
        return f"{self.source}, row {self.row:,}: {self.summary}"

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
            f"{html.escape(token.text)}</span>"
            for token in self.tokens
        )
        title = html.escape(self.title)
        return f"<p><b>{title}</b></p><pre style='white-space:pre-wrap'>{tokens}</pre>"


def views(work: ShardWriter, source: int, sample: Sample) -> Iterator[InspectedRow]:
    """Yield the rows of a sample."""
    shard, tokens = sample.shard, sample.tokens
    name = work.sources[source].source
    unusable = {row: reason for reason, numbers in shard.bad.items() for row in numbers}
    unusable |= dict.fromkeys(shard.too_long, "too long")
    for row in sample.rows:
        examples = np.flatnonzero(tokens.rows == row).tolist()
        if not examples:
            yield InspectedRow(name, row, f"cannot be used: {unusable.get(row, NO_TOKEN)}")
        for number, example in enumerate(examples, 1):
            ids, trained = tokens.example(example)
            cut = row in shard.truncated and len(ids) >= work.data.max_length
            summary = f"example {number:,} of {len(examples):,}, " if len(examples) > 1 else ""
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
