"""Rows as text, with the characters that are trained on: the core's answer to `render`."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from .errors import DataError
from .jinja import MARKED
from .jinja import render as render_chat
from .recipe import Data
from .tokenizer import Tokenizer
from .types import Rendered, Row, Span

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
CHATML = Path(__file__).with_name("chatml.jinja")
"""The template of models made from scratch."""

# A template is a program, and may trip over a row in as many ways.
WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

Text = tuple[str, list[Span]]


class BadRow(Exception):
    """A row that cannot be used, and why."""


class Chat:
    """A tokenizer's chat template, with the spans that the assistant wrote."""

    def __init__(self, tokenizer: Tokenizer, data: Data) -> None:
        template = tokenizer.chat_template
        if not template:
            raise DataError(
                "the data holds chats, but the tokenizer has no chat template. Set "
                'model.chat_template = "FILE.jinja", or give rows with prompt and completion'
            )
        marked = data.train_on == "all" or MARKED.search(template)
        usable = template if marked else training_template(template)
        if usable is None:
            raise DataError(
                "the chat template does not mark what the assistant wrote: it has no "
                "{% generation %} block, and trl has no training variant of it. Copy the template "
                "into a file, put {% generation %} and {% endgeneration %} around the assistant's "
                'words and end-of-turn token, and set model.chat_template = "FILE.jinja"; or set '
                'data.train_on = "all"'
            )
        self.own: str = template
        self.template: str = usable
        self.differs = False
        self.variables = {**(tokenizer.special_tokens_map or {}), **data.template_kwargs}

    def render(self, messages: list[Row], tools: Any = None, prompt: bool = False) -> Text:
        """Return a conversation's text, and the spans of its assistant."""
        given = {
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
            **self.variables,
        }
        try:
            text, spans = render_chat(self.template, messages, given)
            if self.template is not self.own and not self.differs:
                self.differs = render_chat(self.own, messages, given)[0] != text
        except (TemplateError, *WRONG) as error:
            reason = " ".join(str(error).split())
            raise BadRow(f"the chat template refuses it: {reason}") from error
        return text, _joined(spans)

    def describe(self) -> str:
        """Say where the spans come from."""
        if self.template is self.own:
            return "the chat template's generation blocks"
        # Some of trl's keep the thoughts of every turn, where the model's own drops earlier ones.
        note = ", which writes some chats otherwise than the model's own" if self.differs else ""
        return f"trl's training variant of the chat template{note}"


def training_template(template: str) -> str | None:
    """Return trl's variant of a template that marks the assistant's words, if trl has one.

    trl keeps each as NAME.jinja and NAME_training.jinja; importing it would take four seconds.
    """
    spec = find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    for path in sorted(folder.glob("*_training.jinja")):
        plain = path.with_name(path.name.replace("_training.jinja", ".jinja"))
        if plain.is_file() and plain.read_text(encoding="utf8") == template:
            return path.read_text(encoding="utf8")
    return None


def render(rows: list[Row], tokenizer: Tokenizer, data: Data) -> Rendered | None:
    """Render rows of messages, prompt and completion, or text; None if they are neither."""
    renamed = [_rename(row, data.columns) for row in rows]
    kind = kind_of(renamed)
    if kind is None:
        return None
    result = Rendered(special_tokens=kind in ("text", "completion"))
    one, describe = _renderer(kind, tokenizer, data)
    for number, row in enumerate(renamed):
        try:
            text, spans = one(row)
            text.encode()
            if not any(stop > start for start, stop in spans):
                raise BadRow("no trained token")
        except UnicodeEncodeError:
            result.bad[number] = "half a character (a lone surrogate)"
            continue
        except BadRow as error:
            result.bad[number] = str(error)
            continue
        result.texts.append(text)
        result.spans.append(spans)
        result.rows.append(number)
    result.mask = describe()
    return result


def kind_of(rows: list[Row]) -> str | None:
    """Tell the format of rows by their columns."""
    columns = {column for row in rows for column in row}
    if "messages" in columns:
        return "messages"
    if {"prompt", "completion"} <= columns:
        chats = any(isinstance(row.get("completion"), list) for row in rows)
        return "chat completion" if chats else "completion"
    return "text" if "text" in columns else None


def _renderer(
    kind: str, tokenizer: Tokenizer, data: Data
) -> tuple[Callable[[Row], Text], Callable[[], str]]:
    if kind in ("text", "completion"):
        whole = kind == "text"
        end = tokenizer.eos_token

        def text_of(row: Row) -> Text:
            prompt = "" if whole else _string(row, "prompt", empty=True)
            text = prompt + _string(row, kind)
            text = text if text.endswith(end) else text + end
            return text, [(0 if data.train_on == "all" else len(prompt), len(text))]

        mask = "every token of the text" if whole else "the completion's end of the text"
        return text_of, lambda: mask
    chat = Chat(tokenizer, data)

    def chat_of(row: Row) -> Text:
        if kind == "messages":
            text, spans = chat.render(_messages(row, "messages"), row.get("tools"))
        else:
            prompt = _messages(row, "prompt")
            text, spans = chat.render(prompt + _messages(row, "completion"), row.get("tools"))
            before, _ = chat.render(prompt, row.get("tools"), prompt=True)
            if not text.startswith(before):
                raise BadRow("the chat template writes its prompt otherwise once it is answered")
            spans = [(max(start, len(before)), stop) for start, stop in spans if stop > len(before)]
        if data.train_on == "all":
            spans = [(0, len(text))]
        return text, spans[-1:] if data.train_on == "last" else spans

    if data.train_on == "all":
        return chat_of, lambda: "every token of the chat"
    return chat_of, chat.describe


def _joined(spans: list[tuple[int, int]]) -> list[Span]:
    """Make one of spans that touch: a template may mark a turn and its end one by one."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _rename(row: Row, columns: dict[str, str]) -> Row:
    return {**row, **{ours: row[yours] for ours, yours in columns.items() if yours in row}}


def _string(row: Row, column: str, empty: bool = False) -> str:
    value = row.get(column)
    if value is None:
        raise BadRow(f"no '{column}'")
    if not isinstance(value, str):
        raise BadRow(f"'{column}' is no text")
    if not value and not empty:
        raise BadRow(f"'{column}' is empty")
    return value


def _messages(row: Row, column: str) -> list[Row]:
    messages = row.get(column)
    if messages is None:
        raise BadRow(f"no '{column}'")
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"'{column}' is no list of turns, or an empty one")
    for message in messages:
        if not isinstance(message, dict) or "role" not in message:
            raise BadRow("a turn has no role")
        role, content = message["role"], message.get("content")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRow(f"unknown role {role!r}")
        if not content and not message.get("tool_calls"):
            raise BadRow(f"an empty turn of the {role}")
        if not isinstance(content, str | list | None):
            raise BadRow(f"a turn of the {role} is no text")
    return messages
