"""Read a row of any known format: as a conversation, or as text."""

from collections.abc import Iterator
from typing import Any

from ..base.types import Row
from ..recipe.tables import FORMATS, short
from ..tokens.schema import WEIGHT, WEIGHT_RANGE, is_weight
from .messages import BadRow, Conversation, parse_value, read_turns

TEXTS = ("text", "completion")
"""Formats without a conversation."""
_CHAT_COLUMNS = ("tools", "chat_template_kwargs", WEIGHT)
READ = {
    "messages": {"messages", *_CHAT_COLUMNS},
    "conversations": {"conversations", "system", *_CHAT_COLUMNS},
    "conversation": {"conversation", "system", *_CHAT_COLUMNS},
    "completion": {"prompt", "completion", WEIGHT},
    "chat completion": {"prompt", "completion", *_CHAT_COLUMNS},
    "alpaca": {"instruction", "input", "output", "history", "system", *_CHAT_COLUMNS},
    "text": {"text", WEIGHT},
}
"""Format -> the columns that are read."""


def format_of(row: Row) -> str | None:
    """Return the format of rows with the columns of this one; None if no format has them."""
    name = next((name for name, needed in FORMATS.items() if row.keys() >= {*needed}), None)
    if name == "completion" and isinstance(row[name], list):
        return "chat completion"
    return name


def read_chat(kind: str, row: Row) -> Conversation:
    """Read a row of a format as a conversation."""
    if kind == "chat completion":
        prompt = _turns(row, "prompt")
        chat = read_turns(prompt + _turns(row, "completion"))
        chat.num_prompt = len(prompt)
    elif kind == "alpaca":
        chat = read_turns([*_system(row), *_alpaca(row)])
    else:
        turns = _turns(row, kind)
        chat = read_turns(turns if kind == "messages" else _system(row) + turns)
    if len(row) > 1:
        chat.tools = _tools(row.get("tools"))
        chat.variables = row.get("chat_template_kwargs")
        if not isinstance(chat.variables, dict | None):
            raise BadRow("'chat_template_kwargs' is not an object")
    return chat


def read_weight(row: Row) -> float:
    """Return how much a row counts: its `weight`, 1 by default."""
    weight = row.get(WEIGHT)
    if weight in (None, [], ""):
        return 1.0
    if type(weight) not in (int, float) or not is_weight(weight):
        raise BadRow(f"'weight' is {short(weight)}, and should be {WEIGHT_RANGE}")
    return float(weight)


def read_text(row: Row, column: str, allow_empty: bool = False) -> str:
    """Return the text of a column."""
    value = _value(row, column)
    if not isinstance(value, str):
        raise BadRow(f"'{column}' is not text")
    if not value and not allow_empty:
        raise BadRow(f"'{column}' is empty")
    return value


def _alpaca(row: Row) -> Iterator[Row]:
    history = row.get("history") or []
    pairs = isinstance(history, list) and all(isinstance(pair, list) for pair in history)
    if not pairs or any(len(pair) != 2 for pair in history):
        raise BadRow("'history' is not a list of pairs")
    for pair in history:
        yield {"role": "user", "content": pair[0]}
        yield {"role": "assistant", "content": pair[1]}
    instruction = read_text(row, "instruction", allow_empty=True)
    context = read_text(row, "input", allow_empty=True) if row.get("input") else ""
    yield {"role": "user", "content": "\n".join(filter(None, [instruction, context]))}
    yield {"role": "assistant", "content": read_text(row, "output")}


def _system(row: Row) -> list[Row]:
    """Return the system prompt of the column that Alpaca and ShareGPT have for it."""
    return [{"role": "system", "content": read_text(row, "system")}] if row.get("system") else []


def _tools(value: Any) -> list[Row] | None:
    tools = parse_value(value, "'tools'") if value and isinstance(value, str) else value
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("'tools' is not a list of tools")
    return tools or None


def _value(row: Row, column: str) -> Any:
    if column not in row:
        others = ", ".join(sorted(row)[:8]) or "no columns"
        raise BadRow(f"no '{column}': the row has {others}")
    if row[column] is None:
        raise BadRow(f"'{column}' is null")
    return row[column]


def _turns(row: Row, column: str) -> list[Any]:
    turns = _value(row, column)
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"'{column}' is not a list of turns, or is empty")
    return turns
