"""Data of a recipe as `plugsft.prepare` and `plugsft.inspect` return it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..audit.rows import Audit
    from ..audit.tokens import InspectedRow


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
