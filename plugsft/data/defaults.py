"""The core's answers to the hooks of the data path. They need no torch."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.atomic import is_whole
from ..base.checksums import digest
from ..base.errors import DataError
from ..base.types import Encoded, Rendered, Row, Shard, Slice
from ..hooks import ShardWriter, hookimpl
from ..recipe.tables import Data
from ..tokens.tokenizer import Tokenizer
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
        return tokenizer.encode_texts(texts, special_tokens)

    @hookimpl
    def tokenize(self, slices: list[Slice], work: ShardWriter) -> list[Shard]:
        """Tokenize the slices in order."""
        shards = []
        with work.progress(slices) as advance:
            for part in slices:
                shards.append(work.tokenize(part))
                advance(shards[-1])
        return shards

    @hookimpl
    def cache(
        self, key: dict[str, Any], build: Callable[..., bool], read: Callable[..., Any]
    ) -> Any:
        """Store tokens in the run's output folder; build an entry again that does not open."""
        folder = self.output / "tokens" / digest(key)

        def opens(made: Path) -> bool:
            with suppress(DataError):
                if is_whole(made):
                    read(made)
                    return True
            return False

        build(folder, opens)
        return read(folder)
