"""Render rows as text with trained spans: the core's answer to `render`.

Columns that nothing reads, though they change the meaning of a row, are refused.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import accumulate, compress
from typing import Any, TypeVar

import numpy as np

from ..base.errors import DataError, PluginError
from ..base.types import Rendered, Row, Span
from ..recipe.capabilities import Capability
from ..recipe.tables import Data, short
from ..tokens.schema import COLUMN_TYPES, SCHEMA, WEIGHT, WEIGHT_RANGE, is_weight
from ..tokens.tokenizer import Tokenizer
from .chains import ensure_same_ids
from .chat import Chat
from .formats import (
    MEDIA,
    READ_COLUMNS,
    TEXTS,
    BadRow,
    Parts,
    check_order,
    format_of,
    read_chat,
    read_text,
    read_weight,
)

T = TypeVar("T")
Spelled = tuple[list[tuple[str, list[Span]]], list[str]]
"""The examples of a row, each a text and its trained spans, and warnings."""
LABELS, PAIRS, SCORES = (
    Capability.bundled(name).table
    for name in ("labelled_answers", "preference_pairs", "reward_model")
)
READERS = {"label": LABELS, **dict.fromkeys(("chosen", "rejected"), f"{PAIRS} or {SCORES}")}
"""Column -> the bundled plugins that read it."""
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns by which other tools say which tokens are trained."""
CHANGES_MEANING = {
    "label": "tells good answers from bad ones",
    **dict.fromkeys(("chosen", "rejected"), "is one of two answers to compare"),
    WEIGHT: "says how much a row counts",
    **dict.fromkeys(
        ("weights", "sample_weight"), "says how much a row counts ([data.columns] weight names it)"
    ),
    **MEDIA,
    "input_ids": "holds tokens that were made elsewhere",
    "labels": "holds targets that were made elsewhere",
    **dict.fromkeys(MASKS, "says which tokens are trained"),
}
"""Columns that change the meaning of a row -> their own meaning."""
EVERY, COMPLETION = "every token of the text", "the completion, and the end of the text"
"""What is trained of texts."""
WITHOUT_TEMPLATE = (
    "texts are trained as they are, without the chat template; for a chat model, write lists of "
    "messages in their place, or name prompt and completion instruction and output in "
    "[data.columns]"
)


def render_rows(rows: list[Row], tokenizer: Tokenizer, data: Data) -> Rendered | None:
    """Render rows of a format of formats.py; None for rows of another format."""
    first = lead_row(rows, data)
    kind = format_of(first)
    if kind == "preference":
        answers = isinstance(first.get("prompt"), list) or isinstance(first["chosen"], str)
        column = ("completion" if "prompt" in first else "text") if answers else "messages"
        raise DataError(
            "the data holds preferences (columns chosen and rejected), which no active plugin "
            f'reads. To train on what was chosen, set [data.columns] {column} = "chosen" and '
            'data.ignore = ["rejected"]; to learn which answer is preferred, add '
            + READERS["chosen"]
        )
    if kind is None:
        return None
    return render_format(kind, [renamed(row, data) for row in rows], tokenizer, data)


def render_format(kind: str, rows: list[Row], tokenizer: Tokenizer, data: Data) -> Rendered:
    """Render rows of a format under its own names of columns."""
    result = Rendered(special_tokens=kind in TEXTS, read=READ_COLUMNS[kind])
    if kind in TEXTS:
        if data.system:
            raise DataError("data.system: texts have no system prompt; remove it")
        every = kind == "text" or data.train_on == "all"
        result.mask = EVERY if every else COMPLETION
        warnings = [WITHOUT_TEMPLATE] if kind == "completion" and tokenizer.chat_template else []
        read = partial(_read_text, kind, tokenizer.eos_token, every, warnings)
    else:
        chat = Chat(tokenizer, data)
        result.mask = chat.mask
        read = partial(_read_chat, kind, chat, tokenizer, data.system)
    for number, (examples, warnings) in read_rows(rows, read, result):
        for turn, (text, spans) in enumerate(examples):
            result.texts.append(text)
            result.spans.append(spans)
            result.rows.append(number)
            result.turns.append(turn)
        for warning in warnings:
            result.warnings.setdefault(warning, []).append(number)
    return result


def read_rows(
    rows: list[Row], read: Callable[[Row], T], result: Rendered
) -> Iterator[tuple[int, T]]:
    """Read each row and its weight; a row that cannot be used is noted as bad."""
    weights = [1.0] * len(rows)
    for number, row in enumerate(rows):
        try:
            found = read(row)
            weights[number] = read_weight(row)
        except BadRow as error:
            result.bad.setdefault(number, str(error))
        if number not in result.bad:
            yield number, found
    if any(WEIGHT in row for row in rows):
        result.columns[WEIGHT] = weights


def _read_chat(kind: str, chat: Chat, tokenizer: Tokenizer, system: str, row: Row) -> Spelled:
    conversation = read_chat(kind, row, system)
    found = chat.examples(conversation)
    warnings = [*chat.warnings, *check_order(conversation.messages), *found.warnings]
    examples = [*map(_spell, found.examples)]
    if len(examples) > 1:
        for text, answers in examples:
            ensure_same_ids(text, answers, tokenizer)
    return examples, warnings


def _read_text(kind: str, end: str, every: bool, warnings: list[str], row: Row) -> Spelled:
    prompt = "" if kind == "text" else read_text(row, "prompt", allow_empty=True)
    answer = read_text(row, kind)
    if not answer.endswith(end):
        answer += end
    return [_spell(["", prompt + answer] if every else [prompt, answer])], warnings


def _spell(parts: Parts) -> tuple[str, list[Span]]:
    """The text of an example, and where it is trained: its parts are untrained, trained, ..."""
    text = "".join(parts)
    if not text.isascii():
        try:
            text.encode("utf-16-le")  # the fastest codec that refuses lone surrogates
        except UnicodeEncodeError:
            raise BadRow("half a character (a lone surrogate)") from None
    if not any(parts[1::2]):
        raise BadRow("no trained token")
    ends = [*accumulate(map(len, parts), initial=0)]
    return text, [*zip(ends[1::2], ends[2::2], strict=False)]


def without(row: Row, columns: Collection[str]) -> Row:
    """A row without these columns."""
    return {name: value for name, value in row.items() if name not in columns}


def judge_columns(rows: list[Row], rendered: Rendered, data: Data) -> None:
    """List the unread columns; a row is bad if one of them changes its meaning.

    Null or empty columns do not count.
    """
    if rendered.read is None:
        return
    unread: set[str] = set()
    for number, row in enumerate(rows):
        values = without(renamed(row, data), rendered.read)
        unread.update(values)
        for name, value in values.items():
            meaning = CHANGES_MEANING.get(name.lower())
            if meaning is None or value in (None, [], ""):
                continue
            reader = READERS.get(name.lower())
            add = f"add {reader} to learn from it, or " if reader else ""
            reason = (
                f"'{name}' {meaning}, and no active plugin reads it; "
                f'{add}set data.ignore = ["{name}"] to train without it'
            )
            rendered.bad.setdefault(number, reason)
    rendered.unread = sorted(unread)


def drop_bad_texts(rendered: Rendered) -> None:
    """Drop the texts of bad rows: a wrapper of `render` may mark rows that have texts."""
    good = [row not in rendered.bad for row in rendered.rows]
    lists: list[list[Any]] = [rendered.texts, rendered.spans, rendered.rows, rendered.turns]
    for values in lists:
        values[:] = compress(values, good)


def ensure_texts(rendered: Rendered, where: str) -> None:
    """Refuse texts that are no strings, or that do not have their spans and rows."""
    counts = [len(rendered.texts), len(rendered.spans), len(rendered.rows)]
    if len({*counts}) > 1:
        raise PluginError(
            f"{where} gave {counts[0]:,} texts, {counts[1]:,} lists of spans and {counts[2]:,} "
            "rows; it must give each text its spans and its row"
        )
    for text in rendered.texts:
        if not isinstance(text, str):
            raise PluginError(f"{where} gave the text {short(text)}; each text is a string")


def check_columns(rendered: Rendered, count: int, where: str) -> None:
    """Make columns arrays; refuse those that are no number or boolean for each of `count` rows."""
    for name, values in rendered.columns.items():
        column = f"{where} gave the column '{name}'"
        if name in SCHEMA.names:
            raise PluginError(f"{column}; plugsft has a column of this name: rename it")
        if len(values) != count:
            raise PluginError(
                f"{column} of length {len(values):,}, but the number of rows is {count:,}; it must "
                "give one value for each row"
            )
        held = [values[row] for row in rendered.rows]
        if wrong := [value for value in held if not _is_storable(value)]:
            raise PluginError(
                f"{column} the value {short(wrong[0])}; it must be true, false, an integer of 64 "
                "bits or a float"
            )
        found = np.array(held)
        typed: Any = np.zeros(count, COLUMN_TYPES[found.dtype.kind])
        typed[rendered.rows] = found
        rendered.columns[name] = typed
        if name == WEIGHT and (wrong := [value for value in held if not is_weight(value)]):
            raise PluginError(f"{column} the value {wrong[0]}; it must be {WEIGHT_RANGE}")


def _is_storable(value: Any) -> bool:
    return np.isscalar(value) and np.asarray(value).dtype.kind in COLUMN_TYPES


def lead_row(rows: Iterable[Row | str], data: Data) -> Row:
    """Choose the row that decides how rows are read: that of their source, or of these.

    It is the fullest of those of the most frequent format.
    """
    if data._lead_row:
        return data._lead_row
    named = [renamed(row, data) for row in rows if row and isinstance(row, dict)]
    formats = Counter(map(format_of, named))

    def rank(row: Row) -> tuple[int, int]:
        return formats[format_of(row)], sum(map(bool, row.values()))

    return max(named, key=rank, default={})


def renamed(row: Row, data: Data) -> Row:
    """A row with the names that the formats have, without ignored columns."""
    changed = {*data.ignore, *data.columns.values()}
    if not changed:
        return row  # as most are
    return without(row, changed) | {
        ours: row[yours] for ours, yours in data.columns.items() if yours in row
    }
