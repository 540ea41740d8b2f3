"""Render chats with their template: each trained turn as a served model reads and writes it."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from ..base.errors import DataError
from ..base.types import Row, Span
from ..recipe.tables import Data
from ..tokens.tokenizer import Tokenizer
from .formats import BadRow, Conversation, call_variants, calls_of, parse_arguments, with_calls
from .jinja import CompiledTemplate, compile_template
from .jinja import render as render_chat
from .outlines import Outlines, RenderedChat, Text
from .turns import ASK, Turn, TurnFinder, Unserved, thoughts_of

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


class TemplateRefusal(BadRow):
    """A row that the chat template refuses."""


class Chat:
    """Renders conversations with a tokenizer's chat template; finds the assistant's spans."""

    def __init__(self, tokenizer: Tokenizer, data: Data) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the data holds chats, but the tokenizer has no chat template. Set "
                'model.chat_template = "FILE.jinja", or use rows with prompt and completion'
            )
        self.tokenizer = tokenizer
        self.template = _compile(tokenizer.chat_template)
        self.blocks = tokenizer.honours_blocks and self.template.marked
        if unknown := data.template_kwargs.keys() - self.template.variables:
            raise DataError(
                f"data.template_kwargs: the chat template reads no '{min(unknown)}'; it reads "
                f"{', '.join(sorted(self.template.variables))}"
            )
        self.train_on, self.template_kwargs = data.train_on, data.template_kwargs
        self.variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **(tokenizer.special_tokens_map or {}),
            **data.template_kwargs,
        }
        if tokenizer.day:
            day = datetime.fromisoformat(tokenizer.day)
            self.variables["strftime_now"] = day.strftime
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self.special = [token.content for token in added if token.content.strip()]
        self.stops, self.end = tokenizer.stops, tokenizer.eos_token
        self.mask = BLOCKS if self.blocks else SERVED
        """How the spans are found."""
        if self.train_on == "all":
            self.mask = WHOLE
        self.needs_parts = False
        # Templates of vision models may drop a string and need a list of parts.
        if not self._writes_answers():
            self.needs_parts = True
            self.needs_parts = self._writes_answers()

    @cached_property
    def outlines(self) -> Outlines:
        """What is known of the tokenizer's chats from earlier ones."""
        kept: dict[str, Outlines] = self.tokenizer.kept
        key = repr((self.train_on, self.template_kwargs))
        if key not in kept:
            source = self.tokenizer.chat_template or ""
            tokens = (token for token in self.special if token in source)
            kept[key] = Outlines(
                lambda messages: self.write(messages, self.variables)[0],
                self.render_alone,
                {*self.stops, *tokens, "<think>", "</think>"},
                {*self.template.searched},
            )
        return kept[key]

    def render(self, chat: Conversation) -> RenderedChat:
        """Return the texts of a conversation and their trained spans."""
        if self.blocks or self.train_on == "all":
            return self.render_alone(chat)
        return self.outlines.find(chat)

    def render_alone(self, chat: Conversation) -> RenderedChat:
        """Render a conversation turn by turn."""
        if not chat.has_calls:
            return self._render(chat, chat.messages)
        errors = []
        for messages in call_variants(chat.messages):
            try:
                return self._render(chat, messages)
            except TemplateRefusal as error:
                errors.append(error)
        raise errors[0]

    def _render(self, chat: Conversation, messages: list[Row]) -> RenderedChat:
        variables = self._variables_of(chat)
        text, marks = self.write(messages, variables)
        answers = [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]
        if self.train_on == "all":
            _ensure_context(chat, messages, text)
            self._ensure_all_calls(messages, answers, variables, text)
            _refuse_flags(chat, answers, False, "not to be trained; only the assistant's can be")
            untrained = [n for n, flag in chat.flags.items() if not flag]
            spans = self._spans(text, self._find(messages, variables, untrained))
            return RenderedChat([(text, _complement(spans, len(text)))])
        chosen = self._trained(chat, answers)
        if self.blocks:
            self._ensure_all_calls(messages, answers, variables, text)
            warnings = [it for answer in answers for it in _lost_thoughts(messages[answer], text)]
            return RenderedChat([(text, self._marked(marks, answers, chosen))], warnings)
        _ensure_context(chat, messages, text)
        turns = self._find(messages, variables, chosen)
        self._ensure_all_calls(messages, {*answers} - {*chosen}, variables, text)
        warnings = []
        for number, turn in zip(chosen, turns, strict=True):
            warnings += self._ensure_whole(messages[number], turn)
        # Behind the last trained turn, the template may write no stop token.
        whole = turns[-1].prompt + turns[-1].answer if turns else text
        whole = text if text.startswith(whole) else whole
        if all(whole.startswith(turn.prompt + turn.answer) for turn in turns):
            return RenderedChat([(whole, self._spans(whole, turns))], warnings)
        texts = [(turn.prompt + turn.answer, [_span(turn)]) for turn in turns]
        return RenderedChat(texts, [*warnings, *([UNROLLED] if len(texts) > 1 else [])])

    def _ensure_all_calls(
        self, messages: list[Row], answers: Iterable[int], variables: dict[str, Any], text: str
    ) -> None:
        """Refuse a template that leaves out calls of these answers from the text of a chat.

        What a call says may stand elsewhere in it too. So each call is written once with a name
        that no other has.
        """
        calling = [answer for answer in answers if messages[answer].get("tool_calls")]
        for answer in calling:
            _ensure_calls(messages[answer], text)
        if not calling:
            return
        numbers = count()
        named = [
            with_calls(message, name=lambda name: f"{name}_{next(numbers)}_call")
            if message.get("tool_calls")
            else message
            for message in messages
        ]
        with suppress(TemplateRefusal):
            text = self.write(named, variables)[0]
            for answer in calling:
                calls = zip(calls_of(messages[answer]), calls_of(named[answer]), strict=True)
                if lost := [name for (name, _), (other, _) in calls if other not in text]:
                    raise BadRow(f"the chat template leaves out {lost[0]!r} of a call{ANOTHER}")

    def _spans(self, text: str, turns: list[Turn]) -> list[Span]:
        if not all(text.startswith(turn.prompt + turn.answer) for turn in turns):
            raise BadRow(
                "the chat template writes a turn otherwise once others follow, so a turn cannot be "
                'left out of data.train_on = "all"; set data.train_on = "assistant"'
            )
        return [_span(turn) for turn in turns]

    def _find(
        self,
        messages: list[Row],
        variables: dict[str, Any],
        chosen: list[int],
    ) -> list[Turn]:
        """Return the turns as they are served."""
        if len(chosen) > MAX_ANSWERS:
            raise BadRow(
                f"it has {len(chosen):,} trained answers, and at most {MAX_ANSWERS:,} can be "
                'compared with what a server writes; set data.train_on = "last", or split it'
            )

        try:
            finder = self._finder(variables)
            return [finder.find(messages, number) for number in chosen]
        except Unserved as error:
            raise BadRow(f"{error}{self._cure(messages, variables, chosen)}") from None

    def _finder(self, variables: dict[str, Any]) -> TurnFinder:
        def write(turns: list[Row], prompt: bool) -> str:
            return self.write(turns, {**variables, "add_generation_prompt": prompt})[0]

        stops = sorted(map(re.escape, self.stops), key=len, reverse=True)
        stop = re.compile("|".join(stops) or "(?!)")
        return TurnFinder(write, self.special, stop, self.end)

    def _cure(self, messages: list[Row], variables: dict[str, Any], chosen: list[int]) -> str:
        """Return the variable with which the template writes a chat, after trying; else a hint."""
        for option in THINKING:
            if option.keys() <= self.template.variables:
                finder = self._finder({**variables, **option})
                with suppress(BadRow):
                    for number in chosen:
                        self._ensure_whole(messages[number], finder.find(messages, number))
                    [(name, value)] = option.items()
                    return f"; set data.template_kwargs = {{ {name} = {json.dumps(value)} }}"
        return "; set model.chat_template to another template"

    def _ensure_whole(self, message: Row, turn: Turn) -> list[str]:
        """Refuse a turn if the template leaves out its calls or words; warn of lost thoughts."""
        _ensure_calls(message, turn.answer)
        words = _words_of(message)
        if words and not any(form in turn.answer for form in _forms(words)):
            raise BadRow(f"the chat template leaves out words of the assistant{ANOTHER}")
        return _lost_thoughts(message, turn.answer)

    def _marked(self, marks: list[Span], answers: list[int], chosen: list[int]) -> list[Span]:
        """Return the spans of the blocks of the recipe's own template, as they are written."""
        if chosen == answers:
            return _merge_adjacent(marks)
        for spans in (marks, _merge_adjacent(marks)):
            if len(spans) == len(answers):
                return [spans[answers.index(number)] for number in chosen]
        raise BadRow(
            "the chat template's generation blocks do not tell its answers apart, and not all of "
            "them are to be trained; write one block for each answer"
        )

    def _trained(self, chat: Conversation, answers: list[int]) -> list[int]:
        """Return the assistant's messages that are trained."""
        _refuse_flags(chat, answers, True, "to be trained; only the assistant's are")
        last = answers[-1:] if self.train_on == "last" else answers
        candidates = [n for n in last if n >= chat.num_prompt]
        trained = [n for n in candidates if chat.flags.get(n, True)]
        if candidates and not trained:
            raise BadRow("no trained token: the row's own flags leave nothing")
        return trained

    def _variables_of(self, chat: Conversation) -> dict[str, Any]:
        if chat.tools is None and not chat.variables:
            return self.variables
        if chat.tools and "tools" not in self.template.variables:
            raise BadRow(
                "it has tools, and the chat template takes none (set model.chat_template, take a "
                "model whose template does, or take the tools out)"
            )
        return {**self.variables, "tools": chat.tools, **(chat.variables or {})}

    def write(self, messages: list[Row], variables: dict[str, Any]) -> Text:
        """Return the text that the template writes, and what its generation blocks mark."""
        if self.needs_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            return render_chat(self.template, messages, variables)
        except Exception as error:  # a template is a program, and raises what it likes
            reason = f"the chat template refuses it: {_one_line(error)}"
            raise TemplateRefusal(
                f"{reason}; set model.chat_template to another template"
            ) from error

    def _writes_answers(self) -> bool:
        try:
            return "!answer!" in self.write([ASK, ANSWER], self.variables)[0]
        except BadRow:
            return False


def _refuse_flags(chat: Conversation, answers: list[int], value: bool, what: str) -> None:
    """Refuse a flag of this value at a turn that is not the assistant's."""
    if wrong := [n for n, flag in chat.flags.items() if flag == value and n not in answers]:
        raise BadRow(f"a turn of the {chat.messages[wrong[0]]['role']} is {what}")


def _compile(source: str) -> CompiledTemplate:
    try:
        return compile_template(source)
    except Exception as error:  # a template is a program, and raises what it likes
        raise DataError(f"the chat template is not Jinja: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _in_parts(message: Row) -> Row:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


ANOTHER = "; set model.chat_template to a template that writes them, or take them out of the row"


def _lost_thoughts(message: Row, text: str) -> list[str]:
    """Return a warning if a text lacks the thought of a message."""
    return [DROPPED_THOUGHT for thought in thoughts_of(message) if thought not in text][:1]


def _span(turn: Turn) -> Span:
    return len(turn.prompt), len(turn.prompt) + len(turn.answer)


def _ensure_context(chat: Conversation, messages: list[Row], text: str) -> None:
    """Refuse a template that leaves out tools or their results."""
    for tool in chat.tools or ():
        name = str(tool.get("function", tool).get("name", ""))
        if name not in text:
            raise BadRow(f"the chat template leaves out the tool '{name}'{ANOTHER}")
    for message in messages:
        result = _words_of(message)
        if message["role"] == "tool" and not any(form in text for form in _forms(result)):
            raise BadRow(f"the chat template leaves out a result of a tool{ANOTHER}")


def _words_of(message: Row) -> str:
    return str(message.get("content") or "").rpartition("</think>")[2].strip()


def _ensure_calls(message: Row, text: str) -> None:
    """Refuse a template that leaves out a call, or a value of its arguments.

    Each name and each value is in the text as often as the message has it, not counting the words
    and thoughts beside the call.
    """
    words = {_words_of(message), *thoughts_of(message)}
    beside = "\n".join(part for part in words if part in text)
    # 5 equals 5.0, and True equals 1: they are other values, so their types count.
    values: Counter[tuple[type, Any]] = Counter()
    for name, arguments in calls_of(message):
        values[str, name] += 1
        values.update((type(value), value) for value in _scalars(arguments))
    for (_, value), times in values.items():
        if max(_count(form, text) - _count(form, beside) for form in _forms(value)) < times:
            raise BadRow(f"the chat template leaves out {value!r} of a call{ANOTHER}")


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the texts, numbers and booleans of a call's arguments."""
    parts = parse_arguments(value)
    if isinstance(parts, dict | list):
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _scalars(part)
    elif value is not None:
        yield value


def _count(form: str, text: str) -> int:
    """Count a value in a text; a number stands between other characters than digits."""
    if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", form):
        return len(re.findall(rf"(?<![\d.]){re.escape(form)}(?![\d]|\.\d)", text))
    return text.count(form)


def _forms(value: Any) -> list[str]:
    """Return the forms in which templates write a value."""
    if not isinstance(value, str):
        whole = isinstance(value, float) and value.is_integer()
        return [str(value), json.dumps(value), *([str(int(value))] if whole else [])]
    texts = [value, value.strip()]
    quoted = [json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)]
    twice = [json.dumps(form)[1:-1] for form in quoted]
    safe = [
        form.replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .replace("'", "\\u0027")
        for form in quoted
    ]
    entities = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    python = [repr(value)[1:-1], value.replace("'", "\\'")]
    return [*texts, *quoted, *twice, *safe, *python, entities, entities.replace('"', "&#34;")]


def _merge_adjacent(spans: list[Span]) -> list[Span]:
    """Merge spans that touch: a template may mark a turn and its end separately."""
    merged: list[Span] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _complement(spans: list[Span], size: int) -> list[Span]:
    """Return the spans of a text that these spans leave out."""
    cuts = [0, *(offset for span in sorted(spans) for offset in span), size]
    return list(zip(cuts[::2], cuts[1::2], strict=True))
