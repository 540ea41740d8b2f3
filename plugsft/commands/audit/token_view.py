"""Rows as they are shown: token by token, each with its ids and whether it is trained."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ...data.sample import Sample
from ...data.slices import Work


class Piece(NamedTuple):
    """A token, or several that share a character."""

    text: str
    ids: list[int]
    trained: bool


@dataclass
class View:
    """A row, or one of the examples it gave; without pieces where it gave none."""

    source: str
    row: int
    said: str
    pieces: list[Piece] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The row's place, and what became of it."""
        return f"{self.source}, row {self.row:,}: {self.said}"


def views(work: Work, source: int, sample: Sample) -> Iterator[View]:
    """Yield the rows of a sample."""
    shard, tokens = sample.shard, sample.tokens
    name = work.sources[source].source
    left_out = {row: reason for reason, numbers in shard.bad.items() for row in numbers}
    left_out |= dict.fromkeys(shard.too_long, "too long")
    for row in sample.rows:
        if row in left_out:
            yield View(name, row, f"cannot be used: {left_out[row]}")
        for example in np.flatnonzero(tokens.rows == row):
            ids, trained = tokens.example(int(example))
            cut = ", truncated" if row in shard.truncated else ""
            said = f"{len(ids):,} tokens, {trained.sum():,} trained ({trained.mean():.0%}){cut}"
            yield View(
                name, row, said, list(pieces(work.tokenizer.backend_tokenizer, ids, trained))
            )


def pieces(
    tokenizer: Tokenizer, ids: NDArray[np.int32], trained: NDArray[np.bool_]
) -> Iterator[Piece]:
    """Yield each token's text; tokens that share a character come as one."""
    stream, waiting = DecodeStream(skip_special_tokens=False), list[int]()
    for place, token in enumerate(ids.tolist()):
        waiting.append(token)
        text = stream.step(tokenizer, token)
        if text is not None or place == len(ids) - 1:
            shown = "\ufffd" if text is None else visible(text)
            yield Piece(shown, waiting, bool(trained[place + 1 - len(waiting)]))
            waiting = []


def visible(text: str) -> str:
    """Return a text in which every character can be seen, and none steers a terminal."""
    return "".join(
        "⏎\n" if c == "\n" else c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text
    )
