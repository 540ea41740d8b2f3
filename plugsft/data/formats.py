"""Formats of rows: which columns make one, and rows read as text or as conversations."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any

from ..base.limits import parse_json
from ..base.types import Row
from ..recipe.tables import FORMATS, short
from ..tokens.schema import WEIGHT, WEIGHT_RANGE, is_weight

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Speakers of ShareGPT -> roles."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first or the second."""
WITHOUT_WORDS = {"role", "name", "tool_call_id"}
"""Keys of a message that may come without content: a column may be null."""
KEYS = ("content", "tool_calls", "train", "weight")
"""Other keys of a message; templates may read more."""
KNOWN = {*WITHOUT_WORDS, *REASONING, *KEYS}
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


class BadRow(ValueError):
    """A row that cannot be used, with the reason."""


@dataclass(slots=True)
class Conversation:
    """A conversation."""

    messages: list[Row]
    tools: list[Row] | None = None
    variables: Row | None = None
    """The row's own variables for the chat template."""
    has_calls: bool = False
    """Whether a message calls tools."""
    flags: dict[int, bool] = field(default_factory=dict)
    """Message -> whether the row marks it as trained."""
    num_prompt: int = 0
    """Number of messages at the beginning that are never trained."""


def read_turns(turns: list[Any]) -> Conversation:
    """Read turns; plain turns, which are the most frequent, are not copied."""
    try:
        for turn in turns:
            if (
                len(turn) != 2
                or turn["role"] not in ROLES
                or type(turn["content"]) is not str
                or not turn["content"]
            ):
                break
        else:
            return Conversation(turns)
    except (TypeError, LookupError):
        pass  # not plain
    chat = Conversation([])
    for number, turn in enumerate(turns):
        message = _message(turn)
        chat.messages.append(message)
        chat.has_calls |= "tool_calls" in message
        if (flag := _training_flag(message)) is not None:
            chat.flags[number] = flag
    return chat


def check_order(messages: list[Row]) -> list[str]:
    """Return warnings about an unusual order of turns."""
    roles = [message["role"] for message in messages]
    repeated = {a for a, b in pairwise(roles) if a == b and a in ("user", "assistant")}
    warnings = [f"two turns of the {role} in a row" for role in sorted(repeated)]
    if roles[-1] != "assistant":
        warnings.append(f"the conversation ends with a turn of the {roles[-1]}")
    return warnings


def calls_of(message: Row) -> list[tuple[str, Any]]:
    """Return the calls of a message: name of the tool, and arguments."""
    calls = (call.get("function", call) for call in message.get("tool_calls") or ())
    return [(call["name"], call.get("arguments")) for call in calls]


def call_variants(messages: list[Row]) -> Iterator[list[Row]]:
    """Yield a conversation in the variants that templates accept for calls.

    A call's arguments are an object, as servers give them to templates, or JSON; a call without
    content has an empty or a null content.
    """
    for arguments_of in (parse_arguments, _as_json):
        for empty in ("", None):
            yield [
                {
                    **with_calls(turn, arguments=arguments_of),
                    "content": turn.get("content") or empty,
                }
                if turn.get("tool_calls")
                else turn
                for turn in messages
            ]


def with_calls(message: Row, **edits: Callable[[Any], Any]) -> Row:
    """Return a message whose calls have other arguments or names."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        function = function | {key: edit(function.get(key)) for key, edit in edits.items()}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _message(turn: Any) -> Row:
    """Return a turn as a message with a known role and text as content."""
    message = turn
    if isinstance(turn, dict) and "from" in turn and "role" not in turn:
        message = _from_sharegpt(turn)
    if not isinstance(message, dict) or "role" not in message:
        raise BadRow("a turn has no role")
    has_content = "content" in message
    # As in transformers: tables give every message the fields of all messages.
    message = {key: item for key, item in message.items() if item not in (None, [])}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"unknown role {role!r}")
    if isinstance(content, list):
        content = message["content"] = "".join(_part_text(part, role) for part in content)
    if not isinstance(content, str | None):
        raise BadRow(f"a turn of the {role} is not text")
    for key in message.keys() - KNOWN:
        if meant := _meant(key):
            raise BadRow(f"a turn has '{key}', which nothing reads; did you mean '{meant[0]}'?")
    if message.get("tool_calls"):
        _check_calls(message["tool_calls"])
    elif not has_content and {*message} - WITHOUT_WORDS:
        value_of(message, "content", "turn")  # a misspelt one would be lost
    elif not content and role in ("user", "assistant"):
        raise BadRow(f"an empty turn of the {role}")
    elif content is None:
        message["content"] = ""
    return _with_reasoning(message)


@cache
def _meant(key: str) -> list[str]:
    """Return the known key that another one of a turn is like."""
    return get_close_matches(key, KEYS, 1, 0.8)


def _from_sharegpt(turn: Row) -> Row:
    speaker = turn["from"]
    rest = {
        "content" if key == "value" else key: item for key, item in turn.items() if key != "from"
    }
    role = SPEAKERS.get(str(speaker), speaker)
    if speaker in ("function_call", "tool_call"):
        calls = parse_value(turn.get("value"), "a function call")
        calls = calls if isinstance(calls, list) else [calls]
        functions = [{"type": "function", "function": call} for call in calls]
        return {**rest, "role": role, "content": None, "tool_calls": functions}
    return {**rest, "role": role}


def _part_text(part: Any, role: str) -> str:
    """Return the text of a content part, in OpenAI's format."""
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise BadRow(f"a part of a turn of the {role} is not text ({kind})")
    return str(part["text"])


def _check_calls(calls: Any) -> None:
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("'tool_calls' is not a list of calls with names")
        if not isinstance(parse_arguments(function.get("arguments")), dict):
            raise BadRow(f"'arguments' of a call should be an object, or its JSON: {short(call)}")


def parse_arguments(arguments: Any) -> Any:
    """Return arguments as an object; as they are if they are none."""
    try:
        return parse_value(arguments, "")
    except BadRow:
        return arguments


def _as_json(value: Any) -> Any:
    return value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)


def _training_flag(message: Row) -> bool | None:
    """Return a message's own flag for training: its `train` or `weight`; None without them."""
    train, weight = message.get("train"), message.get("weight")
    if not isinstance(train, bool | None):
        raise BadRow(f"'train' of a turn is {train!r}, and should be true or false")
    if weight not in (None, 0, 1):
        raise BadRow(f"'weight' of a turn is {weight!r}, and should be 0 or 1")
    flags = [flag for flag in (train, weight) if flag is not None]
    return all(flags) if flags else None


def _with_reasoning(message: Row) -> Row:
    """Copy a message's reasoning to the keys that templates read, as transformers does."""
    for name in REASONING:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def parse_value(value: Any, name: str) -> Any:
    """Parse a value that may be JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        raise BadRow(f"{name} is not JSON") from None


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
    value = value_of(row, column)
    if not isinstance(value, str):
        raise BadRow(f"'{column}' is not text")
    if not value and not allow_empty:
        raise BadRow(f"'{column}' is empty")
    return value


def _alpaca(row: Row) -> Iterator[Row]:
    history = row.get("history") or []
    pairs = history if isinstance(history, list) else [None]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
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
    tools = parse_value(value or None, "'tools'")
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("'tools' is not a list of tools")
    return tools or None


def value_of(row: Row, column: str, what: str = "row") -> Any:
    """Return the value of a column, or of a key of a turn; refuse one that is missing or null."""
    if column not in row:
        others = ", ".join(sorted(row)[:8]) or "no columns"
        raise BadRow(f"no '{column}': the {what} has {others}")
    if row[column] is None:
        raise BadRow(f"'{column}' is null")
    return row[column]


def _turns(row: Row, column: str) -> list[Any]:
    turns = value_of(row, column)
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"'{column}' is not a list of turns, or is empty")
    return turns
