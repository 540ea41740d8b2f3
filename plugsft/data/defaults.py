"""The core's answers to the hooks of the data path. They need no torch."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..base.build_once import once
from ..base.checksums import digest
from ..base.console import progress, say
from ..base.machine import is_slow_to_map, look
from ..base.types import CacheEntry, Encoded, Rendered, Row, Shard, Slice, Work
from ..hooks import hookimpl
from ..recipe.tables import Data
from ..tokens.tokenizer import Tokenizer
from ..tokens.tokenizer import encode as encode_texts
from .render import render_rows

T = TypeVar("T")


@contextmanager
def tokenizing(slices: list[Slice]) -> Iterator[Callable[[Shard], None]]:
    """Show the progress of tokenizing; call the function that it yields with each shard."""
    started, rows, tokens = time.monotonic(), 0, 0
    with progress("tokenizing", sum(part.stop - part.start for part in slices), "rows") as advance:

        def done(shard: Shard) -> None:
            nonlocal rows, tokens
            rows, tokens = rows + shard.rows, tokens + shard.tokens
            seconds = max(time.monotonic() - started, 1e-3)
            advance(shard.rows, f"{rows / seconds:,.0f} rows/s, {tokens / seconds:,.0f} tokens/s")

        yield done


def opened(read: Callable[..., T], folder: Path, in_memory: bool = False) -> T:
    """Open a folder by memory map, or read it into memory where mapping is slow."""
    if not in_memory and is_slow_to_map(folder, look()):
        say(f"tokens: reading into memory: {folder} is on a Windows disk, which WSL maps slowly")
        in_memory = True
    return read(folder, in_memory)


@dataclass
class DataDefaults:
    """Prepare tokens slice by slice, in this process."""

    output: Path

    @hookimpl
    def render(self, rows: list[Row], tokenizer: Tokenizer, data: Data) -> Rendered | None:
        """Render messages, prompt and completion, or text."""
        return render_rows(rows, tokenizer, data)

    @hookimpl
    def encode(self, texts: list[str], tokenizer: Tokenizer, special_tokens: bool) -> Encoded:
        """Encode with the model's own tokenizer."""
        return encode_texts(texts, tokenizer, special_tokens)

    @hookimpl
    def tokenize(self, slices: list[Slice], work: Work) -> list[Shard]:
        """Tokenize the slices in order."""
        shards = []
        with tokenizing(slices) as advance:
            for part in slices:
                shards.append(work(part))
                advance(shards[-1])
        return shards

    @hookimpl
    def cache(
        self, key: dict[str, Any], build: Callable[[Path], None], read: Callable[..., CacheEntry]
    ) -> CacheEntry:
        """Store tokens in the run's output folder."""
        say_once = functools.cache(lambda: say("waiting for another process to prepare the data"))
        return opened(read, once(self.output / "tokens" / digest(key), build, say_once))
