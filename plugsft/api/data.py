"""Data of a recipe as `plugsft.prepare` and `plugsft.inspect` return it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..audit.rows import Audit
    from ..audit.token_view import View

SHADE = "background:rgba(60,160,80,.3)"
"""The style of trained tokens in a notebook, on light and dark pages."""


@dataclass(frozen=True)
class PreparedData:
    """Tokens on disk, ready for training."""

    folder: Path
    """The folder of the training tokens; `data.tokens` of a recipe takes it."""
    rows: int
    examples: int
    tokens: int
    trained_tokens: int
    bad_rows: dict[str, int]
    """Reason -> number of rows that cannot be used."""
    truncated: int
    """Examples that were cut to data.max_length."""


class InspectedToken(NamedTuple):
    """A token, or several that share a character."""

    text: str
    ids: list[int]
    trained: bool


@dataclass(frozen=True)
class InspectedRow:
    """A row as the model will see it."""

    source: str
    row: int
    """Its number in the source; the first is 0."""
    summary: str
    """Its tokens in short, or why it cannot be used."""
    tokens: list[InspectedToken]
    """Empty if the row cannot be used."""

    @property
    def trained_text(self) -> str:
        """The text that the model learns to write; ⏎ marks a newline."""
        return "".join(token.text for token in self.tokens if token.trained)

    def __str__(self) -> str:
        text = "".join(f"[{token.text}]" if token.trained else token.text for token in self.tokens)
        return f"{self.source}, row {self.row:,}: {self.summary}\n{text}"

    def _repr_html_(self) -> str:
        tokens = "".join(
            f"<span title='{token.ids}' style='{SHADE if token.trained else ''}'>"
            f"{html.escape(token.text)}</span>"
            for token in self.tokens
        )
        title = html.escape(f"{self.source}, row {self.row:,}: {self.summary}")
        return f"<p><b>{title}</b></p><pre style='white-space:pre-wrap'>{tokens}</pre>"


@dataclass(frozen=True)
class InspectedSource:
    """Counts and findings of a source, from all rows or a sample."""

    name: str
    rows: int
    """Rows of the whole source."""
    sampled: int
    """Rows that were read."""
    examples: int
    tokens: int
    trained_tokens: int
    lengths: list[int]
    """Tokens of each example, before long ones are cut or dropped."""
    bad_rows: dict[str, list[int]]
    """Reason -> rows that cannot be used."""
    facts: list[tuple[str, str]]
    """Labels and texts, as `plugsft inspect` prints them."""
    warnings: list[str]
    errors: list[str]
    """Problems that would stop the run or make training wrong."""

    def _repr_html_(self) -> str:
        lines = [*self.facts, *(("warning", text) for text in self.warnings)]
        lines += [("error", text) for text in self.errors]
        title = f"{self.sampled:,} of {self.rows:,} rows"
        return table_html([(self.name, title), *lines])


@dataclass(frozen=True)
class Inspection:
    """Rows token by token, and findings about each source."""

    rows: list[InspectedRow]
    sources: list[InspectedSource]

    @property
    def errors(self) -> list[str]:
        """Problems of all sources: they would stop or spoil a run."""
        return [f"{source.name}: {error}" for source in self.sources for error in source.errors]

    @property
    def warnings(self) -> list[str]:
        """Warnings of all sources."""
        return [f"{source.name}: {text}" for source in self.sources for text in source.warnings]

    def _repr_html_(self) -> str:
        rows = [row._repr_html_() for row in self.rows]
        return "".join([*rows, *(source._repr_html_() for source in self.sources)])


def prepared_data(folder: Path, facts: dict[str, Any]) -> PreparedData:
    """Return the counts of tokens on disk."""
    return PreparedData(
        folder,
        facts["rows"],
        facts["examples"],
        facts["tokens"],
        facts["trained_tokens"],
        {reason: entry["count"] for reason, entry in facts["bad_rows"].items()},
        facts["truncated"]["count"],
    )


def inspected_row(view: View) -> InspectedRow:
    """Return a row that the audit has split into tokens."""
    tokens = [InspectedToken(*piece[:3]) for piece in view.pieces]
    return InspectedRow(view.source, view.row, view.summary, tokens)


def inspected_source(audit: Audit) -> InspectedSource:
    """Return the counts and findings of an audited source."""
    sample = audit.sample
    return InspectedSource(
        audit.name,
        audit.total,
        len(sample.rows),
        sample.shard.examples,
        sample.shard.tokens,
        sample.shard.trained,
        audit.lengths.tolist(),
        sample.shard.bad,
        audit.facts,
        audit.warnings,
        audit.errors,
    )


def table_html(lines: Sequence[tuple[str, str]]) -> str:
    """Return names and texts as a table for notebooks."""
    left = "style='text-align:left'"
    rows = "".join(
        f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(text)}</td></tr>"
        for name, text in lines
    )
    return f"<table>{rows}</table>"
