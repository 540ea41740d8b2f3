"""Formats of rows: which columns make one, and rows read as text or as conversations.

A chat is read once, into what a server gives to a template: known roles, contents that are text,
reasoning under the keys that templates read, calls as functions whose arguments are objects. What
follows need not ask how a row wrote it.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any

from ..base.limits import parse_json
from ..base.types import Row
from ..recipe.tables import FORMATS, short
from ..tokens.schema import WEIGHT, WEIGHT_RANGE, is_weight

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SPEAKERS = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
"""Speakers of ShareGPT -> roles."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first or the second."""
WITHOUT_WORDS = {"role", "name", "tool_call_id"}
"""Keys of a message that may come without content: a column may be null."""
FLAGS = {"train": "true or false", "weight": "0 or 1"}
"""Keys by which a message says whether it is trained -> their values. A row's weight is another."""
KEYS = ("content", "tool_calls", *FLAGS)
"""Other keys of a message; templates may read more."""
KNOWN = {*WITHOUT_WORDS, *REASONING, *KEYS}
TEXTS = ("text", "completion")
"""Formats without a conversation."""
_CHAT_COLUMNS = ("tools", "chat_template_kwargs", WEIGHT)
READ_COLUMNS = {
    "messages": {"messages", *_CHAT_COLUMNS},
    "conversations": {"conversations", "system", *_CHAT_COLUMNS},
    "conversation": {"conversation", "system", *_CHAT_COLUMNS},
    "completion": {"prompt", "completion", WEIGHT},
    "chat completion": {"prompt", "completion", *_CHAT_COLUMNS},
    "alpaca": {"instruction", "input", "output", "history", "system", *_CHAT_COLUMNS},
    "text": {"text", WEIGHT},
}
"""Format -> the columns that are read."""


Parts = list[str]
"""A text in parts: not trained and trained in turn."""


class BadRow(ValueError):
    """A row that cannot be used, with the reason."""


@dataclass(slots=True)
class Conversation:
    """A conversation, as templates read it."""

    messages: list[Row]
    tools: list[Row] | None = None
    variables: Row | None = None
    """The row's own variables for the chat template."""
    flags: dict[int, bool] = field(default_factory=dict)
    """Message -> whether the row marks it as trained."""
    num_prompt: int = 0
    """Number of messages at the beginning that are never trained."""


def read_turns(turns: list[Any]) -> Conversation:
    """Read turns; plain turns, which are the most frequent, are not copied."""
    if all(map(_is_plain, turns)):
        return Conversation(turns)
    chat = Conversation([*map(_read_turn, turns)])
    for number, message in enumerate(chat.messages):
        told = [key for key in FLAGS if key in message]
        for key in told:
            if message[key] not in (0, 1):  # and so are False and True
                raise BadRow(f"'{key}' of a turn is {message[key]!r}, and should be {FLAGS[key]}")
        if told:
            chat.flags[number] = all(message[key] for key in told)
    return chat


def check_order(messages: list[Row]) -> list[str]:
    """Warn of an unusual order of turns."""
    roles = [message["role"] for message in messages]
    repeated = [role for role in ("assistant", "system", "user") if (role, role) in pairwise(roles)]
    warnings = [f"two turns of the {role} in a row" for role in repeated]
    if roles[-1] != "assistant":
        warnings.append(f"the conversation ends with a turn of the {roles[-1]}")
    return warnings


def _is_plain(turn: Any) -> bool:
    if not isinstance(turn, dict) or len(turn) != 2:
        return False
    content = turn.get("content")
    if type(content) is not str or not content or content.isspace():
        return False
    return turn.get("role") in ROLES


def _read_turn(turn: Any) -> Row:
    if isinstance(turn, dict) and "from" in turn and "role" not in turn:
        turn = _from_sharegpt(turn)
    if not isinstance(turn, dict):
        raise BadRow("a turn is not an object with a role")
    require(turn, "role", "turn")
    # As in transformers: tables give every message the fields of all messages.
    message = {key: item for key, item in turn.items() if item not in (None, [])}
    role, content = message.get("role"), message.get("content", "")
    if role not in ROLES:
        raise BadRow(f"unknown role {role!r}; known are {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_part_text(part, role) for part in content)
    if not isinstance(content, str):
        raise BadRow(f"a turn of the {role} is not text")
    for key in message.keys() - KNOWN:
        if meant := similar(key, KEYS):
            raise BadRow(f"a turn has '{key}', which nothing reads; did you mean '{meant}'?")
    if call := message.pop("function_call", None):  # of OpenAI, before there were tools
        message.setdefault("tool_calls", [call])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [*map(_read_call, calls if isinstance(calls, list) else [calls])]
    elif "content" not in turn and message.keys() - WITHOUT_WORDS:
        require(message, "content", "turn")  # a misspelt one would be lost
    elif not content.strip() and role in ("user", "assistant"):
        raise BadRow(f"an empty turn of the {role}")
    message["content"] = content
    for name in REASONING:
        if name in message:  # as in transformers, under each key that templates read
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


@cache
def similar(name: str, known: Collection[str]) -> str:
    """The known name that a misspelt one is like, or ""."""
    return next(iter(get_close_matches(name, known, 1, 0.8)), "")


def _from_sharegpt(turn: Row) -> Row:
    message = {"content" if key == "value" else key: item for key, item in turn.items()}
    speaker = message.pop("from")
    if speaker in ("function_call", "tool_call"):
        message["tool_calls"] = _parsed(message.pop("content", None))
    return {**message, "role": SPEAKERS.get(str(speaker), speaker)}


def _part_text(part: Any, role: str) -> str:
    """The text of a content part, in OpenAI's format."""
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise BadRow(f"a part of a turn of the {role} is not text ({kind})")
    return str(part["text"])


def _read_call(call: Any) -> Row:
    """Read a call as servers give it to templates: a function whose arguments are an object."""
    rest = {**call} if isinstance(call, dict) else {}
    function = rest.pop("function", None)
    if function is None:  # a call without the outer object
        function = {key: rest.pop(key) for key in ("name", "arguments") if key in rest}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call is not an object with a name, or the JSON of one")
    arguments = _parsed(function.get("arguments"))
    if not isinstance(arguments, dict):
        raise BadRow(f"'arguments' of a call should be an object, or its JSON: {short(call)}")
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def _parsed(value: Any) -> Any:
    """A value that may be written as JSON."""
    if isinstance(value, str):
        with suppress(ValueError):
            return parse_json(value)
    return value


def format_of(row: Row) -> str | None:
    """The format of rows with the columns of this one; None if no format has them."""
    name = next((name for name, needed in FORMATS.items() if row.keys() >= {*needed}), None)
    if name == "completion" and isinstance(row[name], list):
        return "chat completion"
    return name


def read_chat(kind: str, row: Row, system: str = "") -> Conversation:
    """Read a row of a format as a conversation; `system` begins it if it has no system prompt."""
    prompt = _list_of_turns(row, "prompt") if kind == "chat completion" else []
    if kind == "alpaca":
        answers = [*_alpaca(row)]
    else:
        answers = _list_of_turns(row, "completion" if prompt else kind)
    turns = prompt + answers if prompt else answers
    if row.get("system") and "system" in READ_COLUMNS[kind]:
        system = read_text(row, "system")
    elif system and first_role(turns) in ("system", "developer"):
        system = ""
    if system:
        turns = [{"role": "system", "content": system}, *turns]
    chat = read_turns(turns)
    if prompt:
        chat.num_prompt = len(turns) - len(answers)
    if len(row) > 1:
        chat.tools = _parsed(row.get("tools")) or None
        if not _are_all(dict, chat.tools or []):
            raise BadRow("'tools' is not a list of tools, or its JSON")
        chat.variables = row.get("chat_template_kwargs")
        if not isinstance(chat.variables, dict | None):
            raise BadRow("'chat_template_kwargs' is not an object")
    return chat


def first_role(turns: list[Any]) -> str:
    """The role of the first turn, under either of its names; "" if there is no turn."""
    first = turns[0] if turns else None
    speaker = str(first.get("role") or first.get("from")) if isinstance(first, dict) else ""
    return SPEAKERS.get(speaker, speaker)


def read_weight(row: Row) -> float:
    """How much a row counts: its `weight`, 1 by default."""
    weight = row.get(WEIGHT)
    if weight in (None, [], ""):
        return 1.0
    if type(weight) not in (int, float) or not is_weight(weight):
        raise BadRow(f"'weight' is {short(weight)}, and should be {WEIGHT_RANGE}")
    return float(weight)


def read_text(row: Row, column: str, allow_empty: bool = False) -> str:
    """Read the text of a column."""
    value = require(row, column)
    if not isinstance(value, str):
        raise BadRow(f"'{column}' is not text")
    if not value.strip() and not allow_empty:
        raise BadRow(f"'{column}' is empty")
    return value


def _alpaca(row: Row) -> Iterator[Row]:
    history = row.get("history") or []
    if not _are_all(list, history) or any(len(pair) != 2 for pair in history):
        raise BadRow("'history' is not a list of pairs")
    for asked, told in history:
        yield {"role": "user", "content": asked}
        yield {"role": "assistant", "content": told}
    asked = [read_text(row, "instruction", allow_empty=True)]
    if row.get("input"):
        asked.append(read_text(row, "input"))
    yield {"role": "user", "content": "\n".join(filter(None, asked))}
    yield {"role": "assistant", "content": read_text(row, "output")}


def _are_all(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def require(row: Row, column: str, what: str = "row") -> Any:
    """The value of a column, or of a key of a turn; refuses one that is missing or null."""
    if column not in row:
        others = ", ".join(sorted(row)[:8]) or "no columns"
        raise BadRow(f"no '{column}': the {what} has {others}")
    if row[column] is None:
        raise BadRow(f"'{column}' is null")
    return row[column]


def _list_of_turns(row: Row, column: str) -> list[Any]:
    turns = require(row, column)
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"'{column}' is not a list of turns, or is empty")
    return turns
