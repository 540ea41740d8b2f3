"""A row of any known format as a conversation: messages with roles, tools, and what is trained."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ..base.limits import parse_json
from ..base.types import Row
from ..recipe.tables import FORMATS

TEXTS = ("text", "completion")
"""Formats that are no conversations."""
_OF_CHATS = ("tools", "chat_template_kwargs")
READ = {
    "messages": {"messages", *_OF_CHATS},
    "conversations": {"conversations", "system", *_OF_CHATS},
    "conversation": {"conversation", "system", *_OF_CHATS},
    "completion": {"prompt", "completion"},
    "chat completion": {"prompt", "completion", *_OF_CHATS},
    "alpaca": {"instruction", "input", "output", "history", "system", *_OF_CHATS},
    "text": {"text"},
}
"""Format -> the columns that are read."""
REFUSED = {
    "label": "tells good answers from bad ones",
    **dict.fromkeys(("chosen", "rejected"), "is one of two answers to compare ([plugins.dpo])"),
    **dict.fromkeys(("weight", "weights", "sample_weight"), "says how much a row counts"),
    **dict.fromkeys(("image", "images", "pixel_values"), "holds images"),
    **dict.fromkeys(("video", "videos"), "holds videos"),
    **dict.fromkeys(("audio", "audios"), "holds sounds"),
    "input_ids": "holds tokens that were made elsewhere",
    "labels": "holds targets that were made elsewhere",
    **dict.fromkeys(
        ("loss_mask", "completion_mask", "assistant_masks"), "says which tokens are trained"
    ),
}
"""Columns that change the meaning of a row, and their own meaning."""
WARNED = {
    **dict.fromkeys(("score", "scores", "reward", "rewards", "rating"), "says how good a row is"),
    "margin": "says how much better one answer is",
    **dict.fromkeys(
        ("ref_chosen_logps", "ref_rejected_logps"),
        "holds log-probabilities of a reference",
    ),
    "system": "holds a system prompt",
    "tools": "holds tools",
    "chat_template_kwargs": "holds variables of the chat template",
    "history": "holds earlier turns",
}
"""Columns with information that hardly changes the meaning of a row."""
_TELLING = REFUSED.keys() | WARNED.keys()
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
"""Who speaks in ShareGPT's turns, besides the roles themselves."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry their reasoning; templates read the first, or the second."""


class BadRow(ValueError):
    """A row that cannot be used, and why."""


@dataclass(slots=True)
class Talk:
    """A conversation."""

    messages: list[Row]
    tools: list[Row] | None = None
    variables: Row | None = None
    """The row's own variables for the chat template."""
    calls: bool = False
    """Whether a message calls tools."""
    wishes: dict[int, bool] = field(default_factory=dict)
    """Messages that the row itself marks as trained or not."""
    prompt: int = 0
    """Messages at the beginning that are never trained."""

    @property
    def plain(self) -> bool:
        """Whether no turn is told apart from the others of its role."""
        return not (self.wishes or self.prompt)


def kind_of(rows: list[Row]) -> str | None:
    """Tell the format of rows by their columns."""
    columns = {column for row in rows for column in row}
    kind = next((kind for kind, needed in FORMATS.items() if columns.issuperset(needed)), None)
    if kind == "completion" and any(isinstance(row.get(kind), list) for row in rows):
        return "chat completion"
    return kind


def ensure_read(row: Row, read: Collection[str]) -> list[str]:
    """Refuse a row with an unread column that changes its meaning; warn of others.

    `read` are the columns that are read. Null or empty columns do not count.
    """
    unread = {
        meaning: column
        for meaning, column in _telling(tuple(row))
        if column not in read and _says_something(row[column])
    }
    for name in REFUSED:
        if name in unread:
            raise BadRow(
                f"'{unread[name]}' {REFUSED[name]}, and no active plugin reads it; "
                f'data.ignore = ["{unread[name]}"] trains without it'
            )
    return [f"'{unread[name]}' {WARNED[name]}, and nothing reads it" for name in sorted(unread)]


@lru_cache(maxsize=256)
def _telling(columns: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the names of `REFUSED` and `WARNED` that columns have, in whatever case."""
    return [(name.lower(), name) for name in columns if name.lower() in _TELLING]


def _says_something(value: Any) -> bool:
    return value is not None and value != [] and value != ""


def odd_turns(messages: list[Row]) -> list[str]:
    """Return warnings about an unusual order of turns."""
    roles = [message["role"] for message in messages]
    twice = {a for a, b in pairwise(roles) if a == b and a in ("user", "assistant")}
    odd = [f"two turns of the {role} in a row" for role in sorted(twice)]
    if roles[-1] != "assistant":
        odd.append(f"the conversation ends with a turn of the {roles[-1]}")
    return odd


def talk_of(kind: str, row: Row) -> Talk:
    """Read a row as a conversation."""
    if kind == "chat completion":
        prompt = _turns(row, "prompt")
        talk = _read(prompt + _turns(row, "completion"))
        talk.prompt = len(prompt)
    elif kind == "alpaca":
        talk = _read([*_system(row), *_alpaca(row)])
    else:
        turns = _turns(row, kind)
        talk = _read(turns if kind == "messages" else _system(row) + turns)
    if len(row) > 1:
        talk.tools = _tools(row.get("tools"))
        talk.variables = row.get("chat_template_kwargs")
        if not isinstance(talk.variables, dict | None):
            raise BadRow("'chat_template_kwargs' is no object")
    return talk


def string_of(row: Row, column: str, empty: bool = False) -> str:
    """Return a column that holds text."""
    value = _value(row, column)
    if not isinstance(value, str):
        raise BadRow(f"'{column}' is no text")
    if not value and not empty:
        raise BadRow(f"'{column}' is empty")
    return value


def calls_of(message: Row) -> list[tuple[str, Any]]:
    """Return the tools that a message calls, by name, with their arguments."""
    calls = (call.get("function", call) for call in message.get("tool_calls") or ())
    return [(call["name"], call.get("arguments")) for call in calls]


def spellings(messages: list[Row]) -> Iterator[list[Row]]:
    """Yield a conversation in the ways in which templates take calls.

    Where there are no words beside a call, they are empty or null; its arguments are an object
    or JSON, at first as they are given.
    """
    silent = [bool(one.get("tool_calls") and not one.get("content")) for one in messages]
    ways = []
    for nothing in ("", None):
        pairs = zip(messages, silent, strict=True)
        ways.append([{**one, "content": nothing} if bare else one for one, bare in pairs])
    yield from ways
    for way in ways:
        yield [_other_arguments(message) for message in way]


def _read(turns: list[Any]) -> Talk:
    """Look at every turn once; most are as plain as this, and need no copy."""
    try:
        for turn in turns:
            if len(turn) != 2 or turn["role"] not in ROLES or type(turn["content"]) is not str:
                break
            if not turn["content"]:
                break
        else:
            return Talk(turns)
    except (TypeError, LookupError):
        pass  # looked at more closely
    talk = Talk([])
    for place, turn in enumerate(turns):
        message = _message(turn)
        talk.messages.append(message)
        talk.calls |= bool(message.get("tool_calls"))
        if (wish := _wish(message)) is not None:
            talk.wishes[place] = wish
    return talk


def _message(turn: Any) -> Row:
    """Return a turn as a message with a role that is known, and content that is text."""
    message = turn
    if isinstance(turn, dict) and "from" in turn and "role" not in turn:
        message = _from_sharegpt(turn)
    if not isinstance(message, dict) or "role" not in message:
        raise BadRow("a turn has no role")
    # As transformers does: tables give every message the fields of all.
    message = {key: item for key, item in message.items() if item not in (None, [])}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"unknown role {role!r}")
    if isinstance(content, list):
        content = message["content"] = "".join(_part(part, role) for part in content)
    if not isinstance(content, str | None):
        raise BadRow(f"a turn of the {role} is no text")
    if message.get("tool_calls"):
        _check_calls(message["tool_calls"])
    elif not content and role in ("user", "assistant"):
        raise BadRow(f"an empty turn of the {role}")
    elif content is None:
        message["content"] = ""
    return _with_reasoning(message)


def _from_sharegpt(turn: Row) -> Row:
    speaker, value = turn["from"], turn.get("value")
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if speaker in ("function_call", "tool_call"):
        calls = _parsed(value, "a function call")
        calls = calls if isinstance(calls, list) else [calls]
        functions = [{"type": "function", "function": call} for call in calls]
        return {"role": role, "content": None, "tool_calls": functions, **rest}
    return {"role": role, "content": value, **rest}


def _part(part: Any, role: str) -> str:
    """Return the text of a part of a message, as OpenAI writes them."""
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise BadRow(f"a part of a turn of the {role} is no text ({kind})")
    return str(part["text"])


def _check_calls(calls: Any) -> None:
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("'tool_calls' is no list of calls with names")


def _other_arguments(message: Row) -> Row:
    """Return a message with the arguments of its calls as objects instead of JSON, or as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments)
            except ValueError:
                return message
        elif arguments is not None:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _wish(message: Row) -> bool | None:
    """Tell whether a message says itself that it is trained, or not."""
    train, weight = message.get("train"), message.get("weight")
    if not isinstance(train, bool | None):
        raise BadRow(f"'train' of a turn is {train!r}, and should be true or false")
    if weight not in (None, 0, 1):
        raise BadRow(f"'weight' of a turn is {weight!r}, and should be 0 or 1")
    flags = [bool(flag) for flag in (train, weight) if flag is not None]
    return all(flags) if flags else None


def _with_reasoning(message: Row) -> Row:
    """Give a message's reasoning under the names that templates read, as transformers does."""
    for name in REASONING:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _alpaca(row: Row) -> Iterator[Row]:
    history = row.get("history") or []
    pairs = isinstance(history, list) and all(isinstance(one, list) for one in history)
    if not pairs or any(len(pair) != 2 for pair in history):
        raise BadRow("'history' is no list of pairs")
    for pair in history:
        yield {"role": "user", "content": pair[0]}
        yield {"role": "assistant", "content": pair[1]}
    asked = string_of(row, "instruction", empty=True)
    more = string_of(row, "input", empty=True) if row.get("input") else ""
    yield {"role": "user", "content": "\n".join(filter(None, [asked, more]))}
    yield {"role": "assistant", "content": string_of(row, "output")}


def _system(row: Row) -> list[Row]:
    """Return the system prompt that stands in a column of its own: Alpaca's and ShareGPT's."""
    return [{"role": "system", "content": string_of(row, "system")}] if row.get("system") else []


def _tools(given: Any) -> list[Row] | None:
    tools = _parsed(given, "'tools'") if given and isinstance(given, str) else given
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("'tools' is no list of tools")
    return tools or None


def _parsed(given: Any, what: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return parse_json(given)
    except ValueError:
        raise BadRow(f"{what} is no JSON") from None


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
        raise BadRow(f"'{column}' is no list of turns, or an empty one")
    return turns
