"""`plugsft inspect`: rows as the model will see them, and what a sample of the data is like."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .. import registry
from ..answers import DataAnswers
from ..console import is_terminal, out, say
from ..errors import DataError
from ..machine import look
from ..sources import Source, open_source
from ..types import Ints
from ..work import Work
from .sample import listed, take, worker

SAMPLE = 1_000
BINS = 12
BAR = 40
# Every other token is underlined, so that it shows where one ends.
TRAINED = ("bold green", "bold green underline")
SEEN = ("default", "underline")


def inspect(
    path: Path, overrides: Sequence[str], without: Sequence[str], rows: int, first: int
) -> None:
    """Show some rows of each source token by token, and measure its first thousand."""
    recipe, active = registry.load(path, overrides, without)
    active.answer(DataAnswers(recipe.folder))
    registry.check(active, recipe, look())
    opened = [open_source(source) for source in recipe.data.all_sources()]
    with TemporaryDirectory(prefix="plugsft-inspect-") as folder:
        work = worker(recipe, active, opened, Path(folder))
        if rows:
            how = "are green" if is_terminal() else "stand in [[ ]], and a · ends each token"
            say(f"trained tokens {how}\n")
        for number in range(len(opened)):
            if rows:
                _show(work, opened, number, first, rows)
            _measure(work, opened, number)


def _show(work: Work, opened: list[Source], source: int, first: int, rows: int) -> None:
    try:
        sample = take(work, opened, source, first, first + rows)
    except DataError as error:
        say(f"{error}\n")
        return
    shard, tokens = sample.shard, sample.tokens
    left_out = {row: reason for reason, numbers in shard.bad.items() for row in numbers}
    left_out |= dict.fromkeys(shard.too_long, "too long")
    for row in sample.rows:
        title = f"{work.sources[source].source}, row {row}: "
        if row in left_out:
            out.print(Text(f"{title}cannot be used: {left_out[row]}\n", "bold red"))
        for example in np.flatnonzero(tokens.rows == row):
            ids, trained = tokens.example(int(example))
            cut = ", truncated" if row in shard.truncated else ""
            counts = f"{len(ids):,} tokens, {trained.sum():,} trained ({trained.mean():.0%}){cut}"
            out.print(Text(title + counts, "bold"))
            found = list(pieces(work.tokenizer.backend_tokenizer, ids.tolist()))
            text = _paint(found, trained) if is_terminal() else _mark(found, trained)
            out.print(text, end="\n" if text.plain.endswith("\n") else "\n\n")


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield each token's place and text; tokens that share a character come as one."""
    stream, start = DecodeStream(skip_special_tokens=False), 0
    for number, token in enumerate(ids):
        text = stream.step(tokenizer, token)
        if text is not None or number == len(ids) - 1:
            yield start, "\ufffd" if text is None else visible(text)
            start = number + 1


def visible(text: str) -> str:
    """Return a text in which every character can be seen, and none steers a terminal."""
    return "".join(
        "⏎\n" if c == "\n" else c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text
    )


def _paint(found: list[tuple[int, str]], trained: NDArray[np.bool_]) -> Text:
    painted = Text()
    for number, (place, text) in enumerate(found):
        style = (TRAINED if trained[place] else SEEN)[number % 2]
        painted.append(text, style)
    return painted


def _mark(found: list[tuple[int, str]], trained: NDArray[np.bool_]) -> Text:
    marked, inside = "", False
    for place, text in found:
        if trained[place] != inside:
            marked += " [[" if trained[place] else "]] "
            inside = not inside
        marked += text[:-1] + "·\n" if text.endswith("\n") else text + "·"
    return Text(marked + ("]]" if inside else ""))


def _measure(work: Work, opened: list[Source], source: int) -> None:
    """Say what the first rows of a source are like."""
    sample = take(work, opened, source, 0, SAMPLE)
    shard, tokens, data = sample.shard, sample.tokens, work.data
    rows = len(opened[source])
    title = f"{work.sources[source].source}: the first {len(sample.rows):,} of {rows:,} rows"
    out.print(Text(title, "bold"))
    if shard.examples:
        lengths = tokens.lengths
        for line in histogram(lengths):
            say(line)
        shares = tokens.trained / lengths
        say(
            f"lengths    {lengths.min():,} to {lengths.max():,} tokens, median "
            f"{np.median(lengths):,.0f}, mean {lengths.mean():,.1f}; max_length {data.max_length:,}"
        )
        say(
            f"trained    {shard.trained:,} of {shard.tokens:,} tokens "
            f"({shard.trained / shard.tokens:.0%}); of one example {shares.min():.0%} to "
            f"{shares.max():.0%}, median {np.median(shares):.0%}"
        )
        say(f"mask       {shard.mask}")
    for reason, numbers in sorted(shard.bad.items()) or [("", [])]:
        say(f"bad rows   {listed(numbers)}: {reason}" if numbers else "bad rows   none")
    if shard.too_long:
        say(f"too long   {listed(shard.too_long)}")
    say(f"truncated  {listed(shard.truncated) if shard.truncated else 'none'}\n")


def histogram(lengths: Ints) -> list[str]:
    """Draw how often each length occurs."""
    edges = np.unique(np.linspace(lengths.min(), lengths.max() + 1, BINS + 1).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    wide, high = len(f"{edges[-1]:,}"), len(f"{counts.max():,}")
    return [
        f"{edges[bin]:>{wide},} - {edges[bin + 1] - 1:>{wide},}  {count:>{high},}  "
        + "▇" * max(round(count / counts.max() * BAR), int(count > 0))
        for bin, count in enumerate(counts)
    ]
