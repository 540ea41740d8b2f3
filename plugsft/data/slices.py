"""Render, encode and mask a slice of a source, and write it as a shard. Needs no torch."""

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base.atomic import stamp, write_text
from ..base.checksums import add_checksum, parse_checksummed
from ..base.console import progress as progress_bar
from ..base.errors import DataError, PlugsftError
from ..base.sending import sendable
from ..base.types import Rendered, Row, Shard, Slice, SliceResult
from ..hooks import Hooks, is_core, with_plugins
from ..recipe.tables import Data, Source
from ..registry.active import rebuild
from ..tokens.shards import Examples, write_shard
from ..tokens.tokenizer import Tokenizer
from .defaults import DataDefaults
from .examples import ensure_encoded, make_examples, trained_mask
from .render import (
    check_columns,
    drop_bad_texts,
    ensure_texts,
    judge_columns,
    lead_row,
    without,
)
from .row_names import CURE_LONG, counted, cure_bad, describe_bad_rows
from .sources import OpenSource, ensure_columns, slices_of
from .token_rows import hold_tokens, read_tokens

ONE_THREAD = {
    "FASTOKENS_BPE_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of a worker, one per core: more threads would only compete for it."""


@dataclass
class ShardWriter:
    """Turns a slice into a shard. Pickled as options and names of plugins."""

    data: Data
    sources: list[Source]
    tokenizer: Tokenizer
    folder: Path
    plugins: Mapping[str, dict[str, Any]]
    """Plugins that render or encode, with their options."""
    _hooks: Hooks | None = field(default=None, repr=False)
    one_thread = ONE_THREAD

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_hooks": None}

    @property
    def hooks(self) -> Hooks:
        """The hooks of this run; a worker process rebuilds them from the options."""
        if self._hooks is None:
            self._hooks = rebuild(self.plugins).attach(DataDefaults(self.folder)).hooks
        return self._hooks

    def tokenize(self, part: Slice) -> Shard:
        """Render, encode and mask a slice, and write it as one shard."""
        with _collector_off():
            shard, examples = self._prepare(part)
        if self.data.on_bad_row == "error":
            self._refuse(part, shard.bad, cure_bad(shard.bad))
        if self.data.too_long == "error" and shard.too_long:
            long = {f"longer than {self.data.max_length} tokens": shard.too_long}
            self._refuse(part, long, CURE_LONG)
        path = self.path(part)
        shard.examples, shard.tokens = len(examples.rows), len(examples.mask)
        shard.largest = int(examples.ids.max(initial=0))
        shard.trained, shard.columns = write_shard(path, examples), examples.types
        shard.stamp = [*stamp(path)]
        # Written last: after a kill, a shard with this file is complete and need not be rebuilt.
        write_text(path.with_suffix(".json"), json.dumps(add_checksum(vars(shard))))
        return shard

    def _refuse(self, part: Slice, bad: dict[str, list[int]], cure: str) -> None:
        if bad:
            which = describe_bad_rows(bad, part.rows, part.start)
            raise DataError(f"{self.name(part)}: {which}{cure}")

    def attempt(self, part: Slice) -> SliceResult:
        """Tokenize a slice in a worker; return its shard, or an error that can be pickled."""
        try:
            return SliceResult(self.tokenize(part))
        except Exception as error:  # a plugin may raise any error; the main process ends the run
            return SliceResult(None, sendable(error, "in a worker process"))

    def slices(self, sources: Sequence[OpenSource]) -> list[Slice]:
        """Cut sources into slices; refuse configured columns that no row has."""
        if self.sources == self.data.all_sources():
            ensure_columns(self.data, sources)  # evaluation data may lack columns
        return slices_of(sources, [*map(self.data.of, self.sources)])

    def path(self, part: Slice) -> Path:
        """Name the file of a slice's shard; its record is a .json file of the same name."""
        return self.folder / f"data-{part.source:02d}-{part.start:012d}.arrow"

    def where(self, part: Slice) -> str:
        """Name the source and rows of a slice."""
        return f"{self.name(part)}, rows {part.start:,} to {part.stop - 1:,}"

    @contextmanager
    def progress(self, slices: list[Slice]) -> Iterator[Callable[[Shard], None]]:
        """Show the progress of slices; call the function that it yields with each shard."""
        started, rows, tokens = time.monotonic(), 0, 0
        total = sum(part.stop - part.start for part in slices)
        with progress_bar("tokenizing", total, "rows") as advance:

            def add(shard: Shard) -> None:
                nonlocal rows, tokens
                if not shard.elsewhere:
                    rows += shard.rows
                    tokens += shard.tokens
                seconds = max(time.monotonic() - started, 1e-3)
                speed = f"{rows / seconds:,.0f} rows/s, {tokens / seconds:,.0f} tokens/s"
                advance(shard.rows, f"{self.team()}{speed}")

            yield add

    def team(self) -> str:
        """Say what other processes do, for progress."""
        return ""

    def name(self, part: Slice) -> str:
        """Name the source of a slice."""
        source = self.sources[part.source]
        return source.source + ("" if source.split == "train" else f" (split {source.split})")

    def find_finished(self, part: Slice) -> Shard | None:
        """Find the shard of a slice if a killed build has left it complete."""
        path = self.path(part)
        try:
            shard = Shard(**parse_checksummed(path.with_suffix(".json").read_text()))
            complete = shard.stamp == [*stamp(path)]
        except (OSError, ValueError, TypeError):
            return None
        return shard if complete and shard.rows == part.stop - part.start else None

    def _prepare(self, part: Slice) -> tuple[Shard, Examples]:
        """Make the examples of a slice; name the row at which a plugin fails."""
        try:
            return self._make_examples(part)
        except PlugsftError:
            raise  # its message names the rows
        except Exception as error:
            error.add_note(f"at {self.where(part)}")
            for row in range(part.start, part.stop):
                rows = part.rows.part(row - part.start, row - part.start + 1)
                try:
                    self._make_examples(replace(part, start=row, stop=row + 1, rows=rows))
                except Exception as row_error:
                    row_error.add_note(f"at {self.where(part)}: it was row {row:,}")
                    raise row_error from None
            raise

    def _make_examples(self, part: Slice) -> tuple[Shard, Examples]:
        """Make the examples of a slice, and a shard that counts what was left out."""
        shard = Shard(self.path(part).name, source=part.source, rows=part.stop - part.start)
        numbers, rows = list[int](), list[Row]()
        for number, row in enumerate(part.rows.read(0, len(part.rows)), part.start):
            if isinstance(row, str):  # the reason why it cannot be read
                shard.bad.setdefault(row, []).append(number)
            else:
                numbers.append(number)
                rows.append(row)
        data = self.data.of(self.sources[part.source])
        data._lead_row = part.lead_row
        if hold_tokens(lead_row(rows, data)):
            self._ensure_unrendered(part)
            rendered, encoded, trained = read_tokens(rows, self.tokenizer, data)
        else:
            source = self.sources[part.source].source
            rendered = render(self.hooks, data, source, rows, self.tokenizer)
            encoded = self.hooks.encode(
                texts=rendered.texts,
                tokenizer=self.tokenizer,
                special_tokens=rendered.special_tokens,
            )
            where = f"{self.name(part)}: {with_plugins(self.hooks.encode)}"
            ensure_encoded(encoded, len(rendered.texts), where)
            trained = trained_mask(encoded, rendered)
        shard.mask, shard.unread = rendered.mask, rendered.unread
        shard.engines.update(encoded.engines)
        for number, reason in rendered.bad.items():
            shard.bad.setdefault(reason, []).append(numbers[number])
        for warning, batch_numbers in rendered.warnings.items():
            warned = sorted({numbers[n] for n in batch_numbers if n not in rendered.bad})
            if warned:
                shard.warnings[warning] = counted(warned)
        row_numbers = np.array(numbers, np.int64)
        return shard, make_examples(encoded, trained, rendered, row_numbers, self.data, shard)

    def _ensure_unrendered(self, part: Slice) -> None:
        """Refuse plugins that render where rows are tokens already."""
        hook: Any = self.hooks.render
        if not all(is_core(each.plugin_name) for each in hook.get_hookimpls()):
            raise DataError(
                f"{self.name(part)}: rows of tokens cannot be used with {with_plugins(hook)}, "
                "which reads rows before they are tokens: name the rows that these were made of, "
                "or remove the plugin"
            )


def render(
    hooks: Hooks, data: Data, source: str, rows: list[Row], tokenizer: Tokenizer
) -> Rendered:
    """Render rows; refuse columns that no format has."""
    if not rows:
        return Rendered()
    if data.ignore:
        rows = [without(row, data.ignore) for row in rows]
    rendered = hooks.render(rows=rows, tokenizer=tokenizer, data=data)
    if rendered is None:
        row = lead_row(rows, data)
        columns = ", ".join(sorted(row)) or "none"
        if data.columns:
            columns += " (renamed by [data.columns])"
        if "input_ids" in row:
            columns += ". For rows of tokens with [model.scratch], set model.tokenizer too"
        raise DataError(
            f"{source}: no format has these columns: {columns}. Known are messages; prompt and "
            "completion; instruction and output; conversations; text. Name yours in "
            '[data.columns], for instance messages = "dialogue", or instruction = "question" and '
            'output = "answer"; or add a plugin that renders them'
        )
    where = f"{source}: {with_plugins(hooks.render)}"
    ensure_texts(rendered, where)
    judge_columns(rows, rendered, data)
    drop_bad_texts(rendered)
    check_columns(rendered, len(rows), where)
    return rendered


def merge(shards: Sequence[Shard]) -> Shard:
    """Add up shards, for messages and records."""
    total = Shard("")
    for shard in shards:
        total.rows += shard.rows
        total.examples += shard.examples
        total.tokens += shard.tokens
        total.trained += shard.trained
        total.largest = max(total.largest, shard.largest)
        total.too_long += shard.too_long
        total.truncated += shard.truncated
        total.kept_rows += shard.kept_rows
        total.longest += shard.longest
        total.engines.update(shard.engines)
        for reason, rows in shard.bad.items():
            total.bad.setdefault(reason, []).extend(rows)
        for warning, new in shard.warnings.items():
            known = total.warnings.setdefault(warning, {"count": 0, "rows": []})
            known["count"] += new["count"]
            known["rows"] = (known["rows"] + new["rows"])[:10]
        total.unread = sorted({*total.unread, *shard.unread})
    total.mask = "; ".join(sorted({shard.mask for shard in shards if shard.examples}))
    return total


@contextmanager
def _collector_off() -> Iterator[None]:
    """Turn the garbage collector off: rows have no cycles, and it takes a tenth of the time."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.enable()
        gc.unfreeze()
