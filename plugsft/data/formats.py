"""Formats of rows: which columns make one, and rows read as text or as conversations.

A chat is read once, into what a server gives to a template: known roles, contents that are text,
reasoning under the keys that templates read, calls as functions whose arguments are objects. What
follows need not ask how a row wrote it.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any

from ..base.errors import did_you_mean
from ..base.limits import limited_depth
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
SPEAKING = ("user", "assistant")
"""Roles whose turns have words."""
WITHOUT_WORDS = {"role", "name", "tool_call_id"}
"""Keys of a message that may come without content: a column may be null."""
FLAGS = {"train": "true or false", "weight": "0 or 1"}
"""Keys by which a message says whether it is trained -> their values. A row's weight is another."""
KEYS = ("content", "tool_calls", *FLAGS)
"""Other keys of a message; templates may read more."""
KNOWN = {*WITHOUT_WORDS, *REASONING, *KEYS}
MEDIA = {
    **dict.fromkeys(("image", "images", "pixel_values"), "holds images"),
    **dict.fromkeys(("video", "videos"), "holds videos"),
    **dict.fromkeys(("audio", "audios"), "holds sounds"),
}
"""Columns of rows, and keys of messages, that hold more than text -> what they hold."""
NOT_READ = {
    **dict.fromkeys(
        ("loss", "loss_mask", "loss_weight", "mask", "masked", "trainable", "training"),
        "says whether it is trained; write it as 'train': true or false",
    ),
    **{key: f"{held}, and only text is trained; take it out" for key, held in MEDIA.items()},
}
"""Keys of a message that other tools read -> what is wrong, and the cure."""
NOTHING: tuple[Any, ...] = (None, "", [])
"""Values of a list that a row need not have: a table has a column for all rows."""
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
    if any(two[1] == "system" != two[0] for two in pairwise(roles)):
        warnings.append("a turn of the system in the middle, where few models have seen one")
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
        meant = did_you_mean(str(role), [*ROLES, *SPEAKERS])
        raise BadRow(f"unknown role {short(role)}{meant or ';'} known are {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_part_text(part, role) for part in content)
    if not isinstance(content, str):
        raise BadRow(f"a turn of the {role} is not text")
    _check_keys(message)
    if "function_call" in message:  # of OpenAI, before there were tools
        if "tool_calls" in message:
            raise BadRow("a turn has 'function_call' and 'tool_calls'; write all as 'tool_calls'")
        message["tool_calls"] = message.pop("function_call")
    if "tool_calls" in message:
        if role != "assistant":
            raise BadRow(f"a turn of the {role} has 'tool_calls'; only the assistant's may")
        calls = message["tool_calls"]
        message["tool_calls"] = [*map(_read_call, calls if isinstance(calls, list) else [calls])]
    elif "content" not in turn and (role in SPEAKING or message.keys() - WITHOUT_WORDS):
        require(message, "content", "turn")  # a misspelt one would be lost
    elif not content.strip() and role in SPEAKING:
        raise BadRow(f"an empty turn of the {role}")
    message["content"] = content
    for name in REASONING:
        if name in message:  # as in transformers, under each key that templates read
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _check_keys(message: Row) -> None:
    """Refuse keys that are misspelt, of other tools, or of another type."""
    for key in message.keys() - KNOWN:
        if why := NOT_READ.get(key.lower()):
            raise BadRow(f"'{key}' of a turn {why}")
        if meant := similar(key, KEYS):
            raise BadRow(f"a turn has '{key}', which nothing reads; did you mean '{meant}'?")
    for key in REASONING:
        if not isinstance(message.get(key, ""), str):
            raise BadRow(f"'{key}' of a turn is {short(message[key])}, and should be text")


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
    if told := part.keys() & {*FLAGS, *NOT_READ}:
        raise BadRow(f"a part of a turn has '{min(told)}'; only a turn may: as 'train' or 'weight'")
    return str(part["text"])


def _read_call(call: Any) -> Row:
    """Read a call as servers give it to templates: a function whose arguments are an object."""
    rest = {**call} if isinstance(call, dict) else {}
    function = rest.pop("function", None)
    if function is None:  # a call without the outer object
        function = {key: rest.pop(key) for key in ("name", "arguments") if key in rest}
    if not _is_named(function):
        raise BadRow("a tool call is not an object with a name, or the JSON of one")
    arguments = _parsed(function.get("arguments"))
    if not isinstance(arguments, dict):
        found = short(function["arguments"]) if "arguments" in function else "missing"
        raise BadRow(
            f"the arguments of a call of {function['name']} are {found}; write an object, or its "
            "JSON: {} for none"
        )
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise BadRow(f"'arguments' of a call hold what is not JSON: {short(call)}") from None
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def _is_named(function: Any) -> bool:
    """Tell whether a function, called or offered, is an object with a name."""
    name = function.get("name") if isinstance(function, dict) else None
    return isinstance(name, str) and bool(name.strip())


def _parsed(value: Any) -> Any:
    """A value that may be written as JSON, which is trained as it is written."""
    if not isinstance(value, str):
        return value
    try:
        with limited_depth():
            return json.loads(
                value,
                object_pairs_hook=once,
                parse_float=_as_written,
                parse_constant=_as_written,
            )
    except BadRow:
        raise
    except ValueError:
        return value


def once(pairs: list[tuple[str, Any]]) -> Row:
    """Make an object of JSON; refuse a key that is there more than once."""
    made = dict(pairs)
    if len(made) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise BadRow(f"the key '{twice}' is there more than once")
    return made


def _as_written(text: str) -> float:
    """Read a number; refuse one that is written in another way once it is read."""
    number = float(text)
    if repr(number) != text:
        raise BadRow(
            f"the number {text[:40]} in JSON is read as {number!r}; write it as it is read, or as "
            "a text"
        )
    return number


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
    own = read_optional(row, "system") if "system" in READ_COLUMNS[kind] else ""
    if own:
        system = own
    elif system and first_role(turns) in ("system", "developer"):
        system = ""
    if system:
        turns = [{"role": "system", "content": system}, *turns]
    chat = read_turns(turns)
    if prompt:
        chat.num_prompt = len(turns) - len(answers)
    if len(row) > 1:
        chat.tools = _read_tools(row.get("tools"))
        chat.variables = row.get("chat_template_kwargs")
        if not isinstance(chat.variables, dict | None):
            raise BadRow("'chat_template_kwargs' is not an object")
    return chat


def _read_tools(value: Any) -> list[Row] | None:
    tools = _parsed(value)
    if tools in NOTHING:
        return None
    if not _are_all(dict, tools):
        raise BadRow("'tools' is not a list of tools, or its JSON")
    for tool in tools:
        if not _is_named(tool.get("function", tool)):
            raise BadRow(f"a tool is not a function with a name: {short(tool)}")
    return list(tools)


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


def read_optional(row: Row, column: str) -> str:
    """Read the text of a column that may be missing, null or empty: as ""."""
    return "" if row.get(column) in (None, "") else read_text(row, column)


def _alpaca(row: Row) -> Iterator[Row]:
    history = [] if row.get("history") in NOTHING else row["history"]
    if not _are_all(list, history) or any(len(pair) != 2 for pair in history):
        raise BadRow("'history' is not a list of pairs")
    for asked, told in history:
        yield {"role": "user", "content": asked}
        yield {"role": "assistant", "content": told}
    asked = [read_text(row, "instruction", allow_empty=True), read_optional(row, "input")]
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
