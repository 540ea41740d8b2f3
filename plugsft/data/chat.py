"""Examples of chats: each trained turn as a served model reads and writes it."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ..base.errors import DataError, reason_of
from ..base.types import Row
from ..recipe.tables import Data
from ..tokens.ends import ANSWER, ASK
from ..tokens.tokenizer import Tokenizer
from .chains import find_seams, join, make_chains
from .formats import BadRow, Conversation, Parts
from .jinja import compile_template
from .outlines import ChatExamples, Outlines
from .turns import (
    TAG,
    Refused,
    TurnFinder,
    Write,
    ensure_values,
    thoughts_of,
    write_others,
)

CHATML = Path(__file__).with_name("chatml.jinja")
"""Template of models from scratch."""

BLOCKS = "the generation blocks of the recipe's chat template"
SERVED = "each answer as a server would write it, by the chat template"
WHOLE = "every token of the chat"
DROPPED_THOUGHT = "the chat template leaves out thoughts of the assistant"

MAX_ANSWERS = 1000
"""Most trained answers of a chat; each needs renderings of all turns before it."""
THINKING: tuple[tuple[str, Any], ...] = (
    ("enable_thinking", True),
    ("thinking", True),
    ("reasoning_effort", "high"),
)
"""Variables by which templates let a model think."""


class Chat:
    """Finds the examples of conversations under a tokenizer's chat template."""

    needs_parts = False
    """Whether contents are lists of parts: templates of vision models may drop a string."""

    def __init__(self, tokenizer: Tokenizer, data: Data) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the data holds chats, but the tokenizer has no chat template. Set "
                'model.chat_template = "FILE.jinja", or use rows with prompt and completion'
            )
        try:
            self.template = compile_template(tokenizer.chat_template)
        except Exception as error:  # a template is a program, and raises what it likes
            raise DataError(f"the chat template is not Jinja: {reason_of(error)}") from error
        if unknown := data.template_kwargs.keys() - self.template.variables:
            raise DataError(
                f"data.template_kwargs: the chat template reads no '{min(unknown)}'; it reads "
                f"{', '.join(sorted(self.template.variables))}"
            )
        self.train_on = data.train_on
        self.mask = SERVED
        """How it is found what is trained: SERVED, BLOCKS or WHOLE."""
        if data.train_on == "all":
            self.mask = WHOLE
        elif tokenizer.honours_blocks and self.template.marked:
            self.mask = BLOCKS
        clock = datetime.fromisoformat(tokenizer.day) if tokenizer.day else datetime.now()
        self.variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            "strftime_now": clock.strftime,
            **(tokenizer.special_tokens_map or {}),
            **data.template_kwargs,
        }
        added = [*tokenizer.backend_tokenizer.get_added_tokens_decoder().values()]
        self.special = [token.content for token in added if token.content.strip()]
        self.stops, self.end = tokenizer.stops, tokenizer.eos_token
        self.stop = any_of(self.stops)
        short = [ASK, ANSWER]
        self.needs_parts = not self._writes_answer(short) and self._writes_answer(_parted(short))
        self.warnings = _warn_of_markers(self, tokenizer) if tokenizer.honours_blocks else []
        """Warnings of the template; only of one that the recipe names. Models know their own."""
        tokens = {token for token in self.special if token in tokenizer.chat_template}
        self.seams = find_seams(tokens.union(self.stops), added)
        harmful = any_of([*self.stops, *tokens, "<think>", "</think>"])
        outlines = Outlines(self.write, self.examples_by_turn, harmful, {*self.template.searched})
        # What is known of the tokenizer's chats from earlier slices of rows.
        kept: dict[str, Outlines] = tokenizer.kept
        self.outlines = kept.setdefault(data.train_on + repr(data.template_kwargs), outlines)

    def examples(self, chat: Conversation) -> ChatExamples:
        """Find the examples of a conversation."""
        if self.mask == SERVED:
            return self.outlines.examples(chat)
        return self.examples_by_turn(chat)

    def examples_by_turn(self, chat: Conversation) -> ChatExamples:
        """Find examples turn by turn. What the template refuses, or loses, is no row."""
        if chat.tools and "tools" not in self.template.variables:
            raise BadRow(
                "it has tools, and the chat template takes none (set model.chat_template to one "
                "that `plugsft init tools` writes, take a model whose template does, or take the "
                "tools out)"
            )
        own = chat.variables or {}
        if unknown := own.keys() - self.template.variables:
            raise BadRow(
                f"'chat_template_kwargs' sets '{min(unknown)}', and the chat template reads no "
                'such variable; take it out, or set data.ignore = ["chat_template_kwargs"]'
            )
        variables = {**self.variables, **own}
        if chat.tools:
            variables["tools"] = chat.tools
        try:
            return self._examples(chat, variables)
        except Refused as error:
            raise BadRow(f"the chat template {error}; {self._cure(chat, variables)}") from error

    def _cure(self, chat: Conversation, variables: dict[str, Any]) -> str:
        """Say how a chat can be trained: with a variable of the template, if it is written then."""
        for name, value in THINKING:
            if name in self.template.variables:
                with suppress(BadRow):
                    self._examples(chat, {**variables, name: value})
                    return f"set data.template_kwargs = {{ {name} = {json.dumps(value)} }}"
        return "set model.chat_template to another template, or change the row"

    def _examples(self, chat: Conversation, variables: dict[str, Any]) -> ChatExamples:
        def write(turns: list[Row], prompt: bool) -> str:
            return "".join(self._write(turns, {**variables, "add_generation_prompt": prompt}))

        messages = chat.messages
        answers = [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]
        calls = [n for n in answers if messages[n].get("tool_calls")]
        trained = self._trained(chat, answers)
        parts = self._write(messages, variables)
        text = "".join(parts)
        if self.mask == BLOCKS:
            _ensure_written(write, messages, calls, [])  # all else is the template's choice
            if trained != answers:
                parts = _choose(parts, answers, trained)
            return ChatExamples([parts], _lost_thoughts((messages[n], text) for n in answers))
        for tool in chat.tools or []:
            name = str(tool.get("function", tool).get("name", ""))
            if name not in text:
                raise Refused(f"leaves out the tool '{name}'")
        results = [n for n, turn in enumerate(messages) if turn["role"] == "tool"]
        if self.mask == WHOLE:
            _ensure_written(write, messages, calls, results)
            return ChatExamples([["", text]], _lost_thoughts((messages[n], text) for n in answers))
        # The finder looks at the calls of trained turns.
        _ensure_written(write, messages, [n for n in calls if n not in trained], results)
        finder = TurnFinder(write, self.special, self.stop, self.end)
        turns = [finder.find(messages, number) for number in trained]
        told = zip(trained, turns, strict=True)
        warnings = _lost_thoughts((messages[number], answer) for number, (_, answer) in told)
        whole = join(turns, text)
        chains = make_chains(turns, self.seams) if whole is None else [whole]
        return ChatExamples(chains, warnings)

    def _trained(self, chat: Conversation, answers: list[int]) -> list[int]:
        """The assistant's messages that are trained."""
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
        if not candidates:
            raise BadRow("no turn of the assistant to train")
        trained = [n for n in candidates if chat.flags.get(n, True)]
        if candidates and not trained:
            raise BadRow("no trained token: the row's own flags leave nothing")
        if len(trained) > MAX_ANSWERS and self.mask == SERVED:
            raise BadRow(
                f"it has {len(trained):,} trained answers, and at most {MAX_ANSWERS:,} can be "
                'compared with what a server writes; set data.train_on = "last", or split it'
            )
        return trained

    def write(self, messages: list[Row], **variables: Any) -> str:
        """Write messages with the template."""
        return "".join(self._write(messages, {**self.variables, **variables}))

    def _write(self, messages: list[Row], variables: dict[str, Any]) -> Parts:
        if self.needs_parts:
            messages = _parted(messages)
        try:
            return self.template.write(messages, variables)
        except Exception as error:  # a template is a program, and raises what it likes
            if any(message.get("tool_calls") for message in messages):
                with suppress(Exception):
                    return self.template.write([*map(_json_arguments, messages)], variables)
            raise Refused(f"refuses it: {reason_of(error)}") from error

    def _writes_answer(self, messages: list[Row]) -> bool:
        with suppress(BadRow):
            return "!answer!" in self.write(messages)
        return False


def any_of(texts: list[str]) -> re.Pattern[str]:
    """Finds any of these texts, the longest first."""
    texts = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile("|".join(texts) or "(?!)")


def _parted(messages: list[Row]) -> list[Row]:
    """Messages whose contents are lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def _json_arguments(message: Row) -> Row:
    """A message as a few templates need it, which take the arguments of calls as JSON."""
    calls = [{**call, "function": {**call["function"]}} for call in message.get("tool_calls", ())]
    for call in calls:
        arguments = call["function"]["arguments"]
        call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**message, "tool_calls": calls} if calls else message


def _warn_of_markers(chat: Chat, tokenizer: Tokenizer) -> list[str]:
    """Warn of what a template writes like a special token, and the tokenizer reads as text."""
    text, id_of = "", tokenizer.backend_tokenizer.token_to_id
    with suppress(BadRow):  # it may refuse this chat
        text = chat.write([ASK, ANSWER])
    plain = [marker for marker in dict.fromkeys(TAG.findall(text)) if id_of(marker) is None]
    if not plain:
        return []
    return [
        f"the chat template writes {', '.join(plain)}, which the tokenizer reads as ordinary text, "
        "several tokens each; set model.chat_template to a template for this model, or "
        f"model.add_tokens = {json.dumps(plain)}"
    ]


def _lost_thoughts(answers: Iterable[tuple[Row, str]]) -> list[str]:
    """Warn if the text of an answer lacks a thought of its message."""
    lost = [
        thought
        for message, text in answers
        for thought in thoughts_of(message)
        if thought not in text
    ]
    return [DROPPED_THOUGHT] if lost else []


def _choose(parts: Parts, answers: list[int], trained: list[int]) -> Parts:
    """Leave out the blocks of answers that are not trained."""
    if len(parts) // 2 != len(answers):
        raise BadRow(
            "the chat template's generation blocks do not tell its answers apart, and not all of "
            "them are to be trained; write one block for each answer"
        )
    chosen = parts[:1]
    for number, inside, outside in zip(answers, parts[1::2], parts[2::2], strict=True):
        if number in trained:
            chosen += (inside, outside)
        else:
            chosen[-1] += inside + outside
    return chosen


def _ensure_written(
    write: Write, messages: list[Row], calls: list[int], results: list[int]
) -> None:
    """Refuse a template that leaves out a part of a call, or a tool's result."""
    bare = [*messages]
    for number in calls:  # which may come without their words
        bare[number] = {**messages[number], "content": ""}
        ensure_values(write, messages, number)
    if calls or results:
        write_others(write, bare, calls + results)
