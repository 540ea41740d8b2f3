"""The core's answers to the hooks of the data path. They need no torch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.build_once import Fill, Share, once
from ..base.checksums import digest
from ..base.console import say
from ..base.types import Encoded, Rendered, Row, Shard, Slice
from ..hooks import Work, hookimpl
from ..recipe.tables import Data
from ..tokens.tokenizer import Tokenizer
from ..tokens.tokenizer import encode as encode_texts
from .render import render_rows


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
        with work.progress(slices) as advance:
            for part in slices:
                shards.append(work(part))
                advance(shards[-1])
        return shards

    @hookimpl
    def cache(
        self, key: dict[str, Any], build: Fill, read: Callable[..., Any], share: Share
    ) -> Any:
        """Store tokens in the run's output folder."""
        say_once = functools.cache(lambda: say("waiting for another process to prepare the data"))
        return read(once(self.output / "tokens" / digest(key), build, say_once, share=share), False)
