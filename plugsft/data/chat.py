"""Render chats with their template: each trained turn as a served model reads and writes it."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ..base.errors import DataError
from ..base.types import Row, Span
from ..recipe.tables import Data
from ..tokens.tokenizer import Tokenizer
from .formats import BadRow, Conversation
from .jinja import compile_template
from .jinja import render as render_chat
from .outlines import Outlines, RenderedChat, Text
from .turns import (
    ASK,
    Refused,
    TurnFinder,
    Write,
    ensure_written,
    other_words,
    thoughts_of,
)

CHATML = Path(__file__).with_name("chatml.jinja")
"""Template of models from scratch."""

BLOCKS = "the generation blocks of the recipe's chat template"
SERVED = "each answer as a server would write it, by the chat template"
WHOLE = "every token of the chat"
UNROLLED = (
    "the chat template writes a turn otherwise once others follow, so each trained turn of the "
    "chat is an example of its own"
)
DROPPED_THOUGHT = "the chat template leaves out thoughts of the assistant"

MAX_ANSWERS = 1000
"""Most trained answers of a chat; each needs renderings of all turns before it."""
THINKING: tuple[Row, ...] = (
    {"enable_thinking": True},
    {"thinking": True},
    {"reasoning_effort": "high"},
)
"""Variables by which templates let a model think."""
ANSWER: Row = {"role": "assistant", "content": "!answer!"}


class Chat:
    """Renders conversations with a tokenizer's chat template; finds the assistant's spans."""

    def __init__(self, tokenizer: Tokenizer, data: Data) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the data holds chats, but the tokenizer has no chat template. Set "
                'model.chat_template = "FILE.jinja", or use rows with prompt and completion'
            )
        try:
            self.template = compile_template(tokenizer.chat_template)
        except Exception as error:  # a template is a program, and raises what it likes
            raise DataError(f"the chat template is not Jinja: {_one_line(error)}") from error
        if unknown := data.template_kwargs.keys() - self.template.variables:
            raise DataError(
                f"data.template_kwargs: the chat template reads no '{min(unknown)}'; it reads "
                f"{', '.join(sorted(self.template.variables))}"
            )
        self.tokenizer, self.train_on = tokenizer, data.train_on
        self.blocks = tokenizer.honours_blocks and self.template.marked
        self.mask = WHOLE if data.train_on == "all" else BLOCKS if self.blocks else SERVED
        """How the spans are found."""
        self.variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **(tokenizer.special_tokens_map or {}),
            **data.template_kwargs,
        }
        if tokenizer.day:
            self.variables["strftime_now"] = datetime.fromisoformat(tokenizer.day).strftime
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self.special = [token.content for token in added if token.content.strip()]
        self.stops, self.end = tokenizer.stops, tokenizer.eos_token
        stops = sorted(map(re.escape, self.stops), key=len, reverse=True)
        self.stop = re.compile("|".join(stops) or "(?!)")
        # Templates of vision models may drop a string and need a list of parts.
        self.needs_parts = False
        self.needs_parts = not self._writes_answers() and self._writes_answers(parts=True)
        self.outlines = self._outlines(tokenizer.chat_template, repr(data.template_kwargs))

    def _outlines(self, source: str, options: str) -> Outlines:
        """Return what is known of the tokenizer's chats from earlier slices of rows."""
        kept: dict[str, Outlines] = self.tokenizer.kept
        tokens = (token for token in self.special if token in source)
        return kept.setdefault(
            self.train_on + options,
            Outlines(
                lambda messages: self.write(messages, self.variables)[0],
                self.render_alone,
                {*self.stops, *tokens, "<think>", "</think>"},
                {*self.template.searched},
            ),
        )

    def render(self, chat: Conversation) -> RenderedChat:
        """Return the texts of a conversation and their trained spans."""
        if self.blocks or self.train_on == "all":
            return self.render_alone(chat)
        return self.outlines.find(chat)

    def render_alone(self, chat: Conversation) -> RenderedChat:
        """Render a conversation turn by turn. What the template refuses, or loses, is no row."""
        if chat.tools and "tools" not in self.template.variables:
            raise BadRow(
                "it has tools, and the chat template takes none (set model.chat_template, take a "
                "model whose template does, or take the tools out)"
            )
        variables = {**self.variables, **(chat.variables or {})}
        if chat.tools:
            variables["tools"] = chat.tools
        try:
            return self._render(chat, variables)
        except Refused as error:
            raise BadRow(f"the chat template {error}; {self._cure(chat, variables)}") from error

    def _cure(self, chat: Conversation, variables: dict[str, Any]) -> str:
        """Say how a chat can be trained: with a variable of the template, if it is written then."""
        for option in THINKING:
            if option.keys() <= self.template.variables:
                with suppress(BadRow):
                    self._render(chat, {**variables, **option})
                    [(name, value)] = option.items()
                    return f"set data.template_kwargs = {{ {name} = {json.dumps(value)} }}"
        return "set model.chat_template to another template, or change the row"

    def _render(self, chat: Conversation, variables: dict[str, Any]) -> RenderedChat:
        def write(turns: list[Row], prompt: bool) -> str:
            return self.write(turns, {**variables, "add_generation_prompt": prompt})[0]

        messages = chat.messages
        answers = [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]
        trained = self._trained(chat, answers)
        text, marks = self.write(messages, variables)
        # The calls of trained turns are looked at where the turns are found.
        looked_at = [n for n in answers if self.mask != SERVED or n not in trained]
        if self.mask != BLOCKS:  # what the recipe's own template leaves out is its choice
            looked_at += [n for n, turn in enumerate(messages) if turn["role"] == "tool"]
            _ensure_tools(chat.tools or [], text)
        _ensure_others(messages, looked_at, write)
        if self.mask == WHOLE:
            return RenderedChat([(text, [(0, len(text))])])
        if self.mask == BLOCKS:
            spans = marks if trained == answers else _choose(marks, answers, trained)
            return RenderedChat(
                [(text, spans)], _lost_thoughts((messages[n], text) for n in answers)
            )
        finder = TurnFinder(write, self.special, self.stop, self.end)
        turns = [finder.find(messages, number) for number in trained]
        warnings = _lost_thoughts(
            (messages[number], turn.answer) for number, turn in zip(trained, turns, strict=True)
        )
        # Behind the last trained turn, the template may write no stop token.
        whole = turns[-1].text if turns else text
        whole = text if text.startswith(whole) else whole
        if all(whole.startswith(turn.text) for turn in turns):
            return RenderedChat([(whole, [turn.span for turn in turns])], warnings)
        texts = [(turn.text, [turn.span]) for turn in turns]
        return RenderedChat(texts, [*warnings, *([UNROLLED] if len(texts) > 1 else [])])

    def _trained(self, chat: Conversation, answers: list[int]) -> list[int]:
        """Return the assistant's messages that are trained."""
        if self.train_on == "all":
            if all(chat.flags.values()):
                return answers
            raise BadRow(
                'a turn is not to be trained, and data.train_on = "all" trains every token; set '
                'data.train_on = "assistant"'
            )
        if wrong := [n for n, flag in chat.flags.items() if flag and n not in answers]:
            role = chat.messages[wrong[0]]["role"]
            raise BadRow(f"a turn of the {role} is to be trained; only the assistant's can be")
        last = answers[-1:] if self.train_on == "last" else answers
        candidates = [n for n in last if n >= chat.num_prompt]
        trained = [n for n in candidates if chat.flags.get(n, True)]
        if candidates and not trained:
            raise BadRow("no trained token: the row's own flags leave nothing")
        if len(trained) > MAX_ANSWERS and self.mask == SERVED:
            raise BadRow(
                f"it has {len(trained):,} trained answers, and at most {MAX_ANSWERS:,} can be "
                'compared with what a server writes; set data.train_on = "last", or split it'
            )
        return trained

    def write(self, messages: list[Row], variables: dict[str, Any]) -> Text:
        """Return the text that the template writes, and what its generation blocks mark."""
        if self.needs_parts:
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                for message in messages
            ]
        try:
            return render_chat(self.template, messages, variables)
        except Exception as error:  # a template is a program, and raises what it likes
            if any(message.get("tool_calls") for message in messages):
                with suppress(Exception):
                    return render_chat(self.template, [*map(_json_arguments, messages)], variables)
            raise Refused(f"refuses it: {_one_line(error)}") from error

    def _writes_answers(self, parts: bool = False) -> bool:
        self.needs_parts = parts
        try:
            return "!answer!" in self.write([ASK, ANSWER], self.variables)[0]
        except BadRow:
            return False


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _json_arguments(message: Row) -> Row:
    """Return a message as a few templates need it, which take the arguments of calls as JSON."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _lost_thoughts(answers: Iterable[tuple[Row, str]]) -> list[str]:
    """Return a warning if the text of an answer lacks a thought of its message."""
    lost = [
        thought
        for message, text in answers
        for thought in thoughts_of(message)
        if thought not in text
    ]
    return [DROPPED_THOUGHT] if lost else []


def _choose(marks: list[Span], answers: list[int], trained: list[int]) -> list[Span]:
    """Return the marked spans of the trained answers."""
    if len(marks) != len(answers):
        raise BadRow(
            "the chat template's generation blocks do not tell its answers apart, and not all of "
            "them are to be trained; write one block for each answer"
        )
    return [mark for mark, number in zip(marks, answers, strict=True) if number in trained]


def _ensure_tools(tools: list[Row], text: str) -> None:
    """Refuse a template that leaves out a tool."""
    for tool in tools:
        name = str(tool.get("function", tool).get("name", ""))
        if name not in text:
            raise Refused(f"leaves out the tool '{name}'")


def _ensure_others(messages: list[Row], looked_at: list[int], write: Write) -> None:
    """Refuse a template that leaves out a call, or the result of a tool, in some messages."""
    stand_for: dict[str, str] = {}
    others = [*messages]
    for number in looked_at:
        turn = messages[number]
        if turn["role"] == "tool":
            others[number] = other_words(turn, stand_for)
        elif turn.get("tool_calls"):
            others[number] = other_words({**turn, "content": ""}, stand_for)
    if stand_for:
        ensure_written(stand_for, write(others, False))
