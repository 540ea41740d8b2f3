"""Render chats with their template, and find the assistant's characters."""

from contextlib import suppress
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ..base.errors import DataError
from ..base.types import Row, Span
from ..recipe.tables import Data
from ..tokens.tokenizer import Tokenizer
from .jinja import CompiledTemplate, compile_template
from .jinja import render as render_chat
from .messages import BadRow, Conversation, call_variants, calls_of

CHATML = Path(__file__).with_name("chatml.jinja")
"""Template of models from scratch."""

BLOCKS = "the chat template's generation blocks"
VARIANT = "trl's training variant of the chat template"
WRITTEN = f"{VARIANT}, which writes all rows"
BEGINNINGS = "each chat compared with its beginnings, as the chat template writes them"
WHOLE = "every token of the chat"

# A template is a program: these are the errors that it may raise for a row.
TEMPLATE_ERRORS = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError),
)
MAX_ANSWERS = 1000
"""Most answers of a chat to find by comparison; each needs a rendering of all turns before it."""
REWRITES = (
    "the chat template rewrites earlier turns, so that the assistant's words cannot be told apart: "
)
# A chat that tests a template.
ASK, ANSWER = {"role": "user", "content": "!ask!"}, {"role": "assistant", "content": "!answer!"}

Text = tuple[str, list[Span]]


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
        self.own = _compile(tokenizer.chat_template)
        training = training_template(tokenizer.chat_template)
        self.blocks = WRITTEN if training == tokenizer.chat_template else BLOCKS
        self.training = _compile(training) if training and not self.own.marked else None
        self.variant_chosen, self.unproved = tokenizer.variant_chosen, tokenizer.unproved
        if unknown := data.template_kwargs.keys() - self.own.variables:
            raise DataError(
                f"data.template_kwargs: the chat template reads no '{min(unknown)}'; it reads "
                f"{', '.join(sorted(self.own.variables))}"
            )
        self.train_on = data.train_on
        self.variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **(tokenizer.special_tokens_map or {}),
            **data.template_kwargs,
        }
        self.methods: set[str] = set()
        """Methods that found spans."""
        self.needs_parts = False
        # Templates of vision models may drop a string and need a list of parts.
        if not self._writes_answers():
            self.needs_parts = True
            self.needs_parts = self._writes_answers()

    @cached_property
    def header(self) -> str:
        """The text that the template writes before an answer: the assistant's role."""
        try:
            question = self._write(self.own, [ASK], self.variables)[0]
            prompt = self.write_prompt([ASK], self.variables)
            whole = self._write(self.own, [ASK, ANSWER], self.variables)[0]
        except BadRow:
            return ""
        end = common_prefix(prompt, whole)
        return prompt[len(question) : end] if prompt.startswith(question) else ""

    def render(self, chat: Conversation) -> Text:
        """Return the text of a conversation and its trained spans."""
        if not chat.has_calls:
            return self._render(chat, chat.messages)
        errors = []
        for messages in call_variants(chat.messages):
            try:
                return self._render(chat, messages)
            except BadRow as error:
                errors.append(error)
        # A template may refuse one variant; any other error is more informative.
        raise min(errors, key=lambda error: isinstance(error, TemplateRefusal))

    def describe(self) -> str:
        """Describe the methods that found the spans."""
        methods = (self.blocks, VARIANT, BEGINNINGS, WHOLE)
        return ", or ".join(method for method in methods if method in self.methods)

    def _render(self, chat: Conversation, messages: list[Row]) -> Text:
        variables = self._variables_of(chat)
        text, marks = self._write(self.own, messages, variables)
        train_all = self.train_on == "all"
        method, spans = "", list[Span]()
        if not train_all or chat.has_calls or chat.flags:
            method, spans = self._marked_spans(text, marks, messages, variables)
        if chat.has_calls:
            _ensure_calls(messages, "".join(text[a:b] for a, b in spans) if method else text)
        if train_all and not chat.flags:
            self.methods.add(WHOLE)
            return text, [(0, len(text))]
        if method and chat.trains_all_answers and self.train_on == "assistant":
            self.methods.add(method)
            return text, _merge_adjacent(spans)
        answers = [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]
        chosen = self._untrained(chat, answers) if train_all else self._trained(chat, answers)
        for turn_spans in (spans, _merge_adjacent(spans)) if method else ():
            if len(turn_spans) == len(answers):
                self.methods.add(method)
                span_of = dict(zip(answers, turn_spans, strict=True))
                break
        else:
            self.methods.add(BEGINNINGS)
            span_of = self._compare_beginnings(text, messages, variables, chosen)
        spans = [span_of[answer] for answer in chosen]
        if chat.num_prompt and not train_all:
            spans = self._after_prompt(text, spans, messages[: chat.num_prompt], variables)
        return text, _complement(spans, len(text)) if train_all else spans

    def _trained(self, chat: Conversation, answers: list[int]) -> list[int]:
        """Return the assistant's messages that are trained."""
        if wrong := [n for n, flag in chat.flags.items() if flag and n not in answers]:
            role = chat.messages[wrong[0]]["role"]
            raise BadRow(f"a turn of the {role} is to be trained; only the assistant's are")
        last = answers[-1:] if self.train_on == "last" else answers
        candidates = [n for n in last if n >= chat.num_prompt]
        trained = [n for n in candidates if chat.flags.get(n, True)]
        if candidates and not trained:
            raise BadRow("no trained token: the row's own flags leave nothing")
        return trained

    def _untrained(self, chat: Conversation, answers: list[int]) -> list[int]:
        """Return the messages that are not trained although `train_on` is "all"."""
        untrained = [n for n, flag in chat.flags.items() if not flag]
        if wrong := [n for n in untrained if n not in answers]:
            role = chat.messages[wrong[0]]["role"]
            raise BadRow(f"a turn of the {role} is not to be trained; only the assistant's can be")
        return untrained

    def _marked_spans(
        self, text: str, marks: list[Span], messages: list[Row], variables: dict[str, Any]
    ) -> tuple[str, list[Span]]:
        """Return the spans that a template marks, and the method; "" if none marks them."""
        method = self.blocks if self.own.marked else ""
        if self.training:
            with suppress(BadRow):
                same, marks = self._write(self.training, messages, variables)
                method = VARIANT if same == text else ""
        if method == VARIANT or self.variant_chosen:
            marks = [(self._after_header(text, start), stop) for start, stop in marks]
        return method, marks

    def _after_header(self, text: str, start: int) -> int:
        """Move the start of a span behind the assistant's role.

        Some of trl's variants mark the role, or the newline after it, which the model never writes.
        """
        header = self.header
        for written in range(len(header), -1, -1):
            if text.endswith(header[:written], 0, start) and text.startswith(
                header[written:], start
            ):
                return start + len(header) - written
        return start

    def _after_prompt(
        self, text: str, spans: list[Span], messages: list[Row], variables: dict[str, Any]
    ) -> list[Span]:
        """Remove the generation prompt from spans."""
        try:
            prompt = self.write_prompt(messages, variables)
        except BadRow:
            return spans
        end = common_prefix(prompt, text)
        moved = [(max(end, self._after_header(text, start)), stop) for start, stop in spans]
        return [(start, stop) for start, stop in moved if stop > start]

    def _compare_beginnings(
        self, text: str, messages: list[Row], variables: dict[str, Any], answers: list[int]
    ) -> dict[int, Span]:
        """Find answers by two renderings each: of the turns before it, and up to its end."""
        if len(answers) > MAX_ANSWERS:
            raise BadRow(
                f"it has {len(answers):,} answers, and the chat template marks none of them: "
                f"{self._cure()}"
            )
        spans = {}
        for answer in answers:
            try:
                before = self.write_prompt(messages[:answer], variables)
                until = self._write(self.own, messages[: answer + 1], variables)[0]
            except BadRow:
                raise BadRow(REWRITES + self._cure()) from None
            if not (text.startswith(before) and text.startswith(until)):
                raise BadRow(REWRITES + self._cure())
            # White space after the end of a turn belongs to the template.
            spans[answer] = (len(before), max(len(before), len(until.rstrip())))
        return spans

    def _cure(self) -> str:
        cures = ['model.chat_template = "trl" (its training variant)'] if self.training else []
        cures.append("model.chat_template to a file with {% generation %} blocks")
        cures += ['data.train_on = "last"'] if self.train_on == "assistant" else []
        why = self.unproved and f"trl's training variant is not chosen: {self.unproved}; "
        return f'{why}set {", ".join(cures)} or "all"'

    def _variables_of(self, chat: Conversation) -> dict[str, Any]:
        if chat.tools is None and not chat.variables:
            return self.variables
        if chat.tools and "tools" not in self.own.variables:
            raise BadRow(
                "it has tools, and the chat template takes none (set model.chat_template, take a "
                "model whose template does, or take the tools out)"
            )
        return {**self.variables, "tools": chat.tools, **(chat.variables or {})}

    def write_prompt(self, messages: list[Row], variables: dict[str, Any]) -> str:
        """Return the text that a model would continue to answer these messages."""
        return self._write(self.own, messages, {**variables, "add_generation_prompt": True})[0]

    def _write(
        self, template: CompiledTemplate, messages: list[Row], variables: dict[str, Any]
    ) -> Text:
        if self.needs_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            return render_chat(template, messages, variables)
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            raise TemplateRefusal(f"the chat template refuses it: {_one_line(error)}") from error

    def _writes_answers(self) -> bool:
        try:
            return "!answer!" in self._write(self.own, [ASK, ANSWER], self.variables)[0]
        except BadRow:
            return False


@lru_cache(maxsize=16)
def training_template(template: str) -> str | None:
    """Return trl's training variant of a template, which marks answers; None if trl has none.

    trl stores NAME.jinja and NAME_training.jinja; importing trl would take four seconds.
    """
    spec = find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    for path in sorted(folder.glob("*_training.jinja")):
        plain = path.with_name(path.name.replace("_training.jinja", ".jinja"))
        training = path.read_text(encoding="utf8")
        if template == training or (plain.is_file() and template == plain.read_text("utf8")):
            return training
    return None


def _compile(source: str) -> CompiledTemplate:
    try:
        return compile_template(source)
    except (TemplateError, RecursionError) as error:
        raise DataError(f"the chat template is not Jinja: {_one_line(error)}") from error


def common_prefix(first: Any, second: Any) -> int:
    """Return the length of the common prefix of two texts or lists."""
    if second[: len(first)] == first:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _in_parts(message: Row) -> Row:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _ensure_calls(messages: list[Row], text: str) -> None:
    """Refuse a template that leaves out calls, as some do for messages with content."""
    for message in messages:
        for name, arguments in calls_of(message):
            # A template that writes JSON itself quotes JSON arguments twice.
            literal = arguments.strip() if isinstance(arguments, str) else ""
            if name not in text or literal not in text:
                raise BadRow(f"the chat template leaves out a call of the tool '{name}'")


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
