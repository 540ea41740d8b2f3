"""A chat as its template writes it, and which characters of it the assistant wrote."""

from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ..base.errors import DataError
from ..base.types import Row, Span
from ..recipe.tables import Data
from ..tokens.tokenizer import Tokenizer
from .formats import BadRow, Talk, calls_of, spellings
from .jinja import Compiled, compiled
from .jinja import render as render_chat

CHATML = Path(__file__).with_name("chatml.jinja")
"""The template of models made from scratch."""

BLOCKS = "the chat template's generation blocks"
VARIANT = "trl's training variant of the chat template"
BEGINNINGS = "each chat compared with its beginnings, as the chat template writes them"
WHOLE = "every token of the chat"

# A template is a program, and may trip over a row in as many ways.
WRONG = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
MANY = 1000
"""Most answers of a chat to find by comparing renderings; each needs one of all turns before it."""
SAMPLE = 32
"""Most answers of a chat that `is_stable` checks."""
REWRITES = (
    "the chat template rewrites earlier turns, so that the assistant's words cannot be told apart: "
)
# A chat to try a template with.
ASK, ANSWER = {"role": "user", "content": "!ask!"}, {"role": "assistant", "content": "!answer!"}

Text = tuple[str, list[Span]]


class Chat:
    """A tokenizer's chat template, with the spans that the assistant wrote."""

    def __init__(self, tokenizer: Tokenizer, data: Data) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the data holds chats, but the tokenizer has no chat template. Set "
                'model.chat_template = "FILE.jinja", or give rows with prompt and completion'
            )
        self.own = _compiled(tokenizer.chat_template)
        training = None if self.own.marked else training_template(tokenizer.chat_template)
        self.training = _compiled(training) if training else None
        if unknown := data.template_kwargs.keys() - self.own.variables:
            raise DataError(
                f"data.template_kwargs: the chat template reads no '{min(unknown)}'; it reads "
                f"{', '.join(sorted(self.own.variables))}"
            )
        self.train_on = data.train_on
        self.given: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **(tokenizer.special_tokens_map or {}),
            **data.template_kwargs,
        }
        self.used: set[str] = set()
        """Where spans came from, in words."""
        self.parted = False
        # Templates of models that see images may drop a string, and want a list of parts.
        if not self._writes_answers():
            self.parted = True
            self.parted = self._writes_answers()

    @cached_property
    def header(self) -> str:
        """What the template writes before any answer: the assistant's role."""
        try:
            bare = self._write(self.own, [ASK], self.given)[0]
            asked = self._write(self.own, [ASK], {**self.given, "add_generation_prompt": True})[0]
            answered = self._write(self.own, [ASK, ANSWER], self.given)[0]
        except BadRow:
            return ""
        return asked[len(bare) : _alike(asked, answered)] if asked.startswith(bare) else ""

    def render(self, talk: Talk) -> Text:
        """Return a conversation's text, and the spans of it that are trained."""
        if not talk.calls:
            return self._render(talk, talk.messages)
        problems = []
        for messages in spellings(talk.messages):
            try:
                return self._render(talk, messages)
            except BadRow as problem:
                problems.append(problem)
        # A template refuses what it takes in another way; anything else tells more.
        raise min(problems, key=lambda problem: "refuses" in str(problem))

    def is_stable(self, talk: Talk) -> bool:
        """Tell whether answers stand behind what a model would be given to write them.

        Checks a sample of a long chat's answers: each needs a rendering of all turns before it.
        """
        asked = {**self._variables(talk), "add_generation_prompt": True}
        for messages in spellings(talk.messages):
            places = [n for n, one in enumerate(messages) if n and one["role"] == "assistant"]
            places = places[-1:] if self.train_on == "last" else places
            places = places[:: -(-len(places) // SAMPLE) or 1]
            try:
                text, _ = self._render(talk, messages)
                given = [self._write(self.own, messages[:place], asked)[0] for place in places]
            except BadRow:
                continue
            return all(text.startswith(one) for one in given)
        return True

    def describe(self) -> str:
        """Say where the spans come from."""
        return ", or ".join(way for way in (BLOCKS, VARIANT, BEGINNINGS, WHOLE) if way in self.used)

    def _render(self, talk: Talk, messages: list[Row]) -> Text:
        given = self._variables(talk)
        text, marks = self._write(self.own, messages, given)
        everything = self.train_on == "all"
        way, spans = "", list[Span]()
        if not everything or talk.calls or talk.wishes:
            way, spans = self._marked(text, marks, messages, given)
        if talk.calls:
            _ensure_called(messages, "".join(text[a:b] for a, b in spans) if way else text)
        if everything and not talk.wishes:
            self.used.add(WHOLE)
            return text, [(0, len(text))]
        if way and talk.plain and self.train_on == "assistant":
            self.used.add(way)
            return text, _joined(spans)
        places = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
        needed = self._left_out(talk, places) if everything else self._trained(talk, places)
        for one_each in (spans, _joined(spans)) if way else ():
            if len(one_each) == len(places):
                self.used.add(way)
                turns = dict(zip(places, one_each, strict=True))
                break
        else:
            self.used.add(BEGINNINGS)
            turns = self._compared(text, messages, given, needed)
        spans = [turns[place] for place in needed]
        if talk.prompt and not everything:
            spans = self._behind_prompt(text, spans, messages[: talk.prompt], given)
        return text, _between(spans, len(text)) if everything else spans

    def _trained(self, talk: Talk, places: list[int]) -> list[int]:
        """Return which of the assistant's messages are trained."""
        if wrong := [place for place, wish in talk.wishes.items() if wish and place not in places]:
            role = talk.messages[wrong[0]]["role"]
            raise BadRow(f"a turn of the {role} is to be trained; only the assistant's are")
        last = places[-1:] if self.train_on == "last" else places
        asked = [place for place in last if place >= talk.prompt]
        kept = [place for place in asked if talk.wishes.get(place, True)]
        if asked and not kept:
            raise BadRow("no trained token: the row's own flags leave nothing")
        return kept

    def _left_out(self, talk: Talk, places: list[int]) -> list[int]:
        """Return the messages that are not trained where all others are."""
        found = [place for place, wish in talk.wishes.items() if not wish]
        if wrong := [place for place in found if place not in places]:
            role = talk.messages[wrong[0]]["role"]
            raise BadRow(f"a turn of the {role} is not to be trained; only the assistant's can be")
        return found

    def _marked(
        self, text: str, marks: list[Span], messages: list[Row], given: dict[str, Any]
    ) -> tuple[str, list[Span]]:
        """Return the spans that a template marks, and whose marks they are, if anyone's."""
        if self.own.marked:
            return BLOCKS, marks
        if self.training:
            try:
                same, marks = self._write(self.training, messages, given)
            except BadRow:
                return "", []
            if same == text:
                return VARIANT, [(self._behind_header(text, start), stop) for start, stop in marks]
        return "", []

    def _behind_header(self, text: str, start: int) -> int:
        """Return where the assistant's role ends, where a span begins with it or inside it.

        Some of trl's variants mark the role, or the newline after it, which the model never writes.
        """
        header = self.header
        for written in range(len(header), -1, -1):
            if text.endswith(header[:written], 0, start) and text.startswith(
                header[written:], start
            ):
                return start + len(header) - written
        return start

    def _behind_prompt(
        self, text: str, spans: list[Span], prompt: list[Row], given: dict[str, Any]
    ) -> list[Span]:
        """Take from spans what the template writes to ask for an answer."""
        try:
            asked = self._write(self.own, prompt, {**given, "add_generation_prompt": True})[0]
        except BadRow:
            return spans
        end = _alike(asked, text)
        starts = [max(end, self._behind_header(text, start)) for start, _ in spans]
        return [(at, stop) for at, (_, stop) in zip(starts, spans, strict=True) if stop > at]

    def _compared(
        self, text: str, messages: list[Row], given: dict[str, Any], places: list[int]
    ) -> dict[int, Span]:
        """Find messages by what the template writes up to each: without it, and with it."""
        if len(places) > MANY:
            raise BadRow(
                f"it has {len(places):,} answers, and the chat template marks none of them: "
                f"{self._cure()}"
            )
        asked, found = {**given, "add_generation_prompt": True}, {}
        for place in places:
            try:
                before = self._write(self.own, messages[:place], asked)[0]
                until = self._write(self.own, messages[: place + 1], given)[0]
            except BadRow:
                raise BadRow(REWRITES + self._cure()) from None
            if not (text.startswith(before) and text.startswith(until)):
                raise BadRow(REWRITES + self._cure())
            # White space after the end of a turn belongs to the template.
            found[place] = (len(before), max(len(before), len(until.rstrip())))
        return found

    def _cure(self) -> str:
        cures = ['model.chat_template = "trl" (its training variant, saved with the model)']
        cures = cures if self.training else []
        cures.append("model.chat_template to a file with {% generation %} blocks")
        cures += ['data.train_on = "last"'] if self.train_on == "assistant" else []
        return f'set {", ".join(cures)} or "all"'

    def _variables(self, talk: Talk) -> dict[str, Any]:
        if talk.tools is None and not talk.variables:
            return self.given
        if talk.tools and "tools" not in self.own.variables:
            raise BadRow(
                "it has tools, and the chat template takes none (set model.chat_template, take a "
                "model whose template does, or take the tools out)"
            )
        return {**self.given, "tools": talk.tools, **(talk.variables or {})}

    def _write(self, template: Compiled, messages: list[Row], given: dict[str, Any]) -> Text:
        if self.parted:
            messages = [_part(message) for message in messages]
        try:
            return render_chat(template, messages, given)
        except (TemplateError, *WRONG) as error:
            raise BadRow(f"the chat template refuses it: {_line(error)}") from error

    def _writes_answers(self) -> bool:
        try:
            return "!answer!" in self._write(self.own, [ASK, ANSWER], self.given)[0]
        except BadRow:
            return False


@lru_cache(maxsize=16)
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
        training = path.read_text(encoding="utf8")
        if template == training or (plain.is_file() and template == plain.read_text("utf8")):
            return training
    return None


def _compiled(source: str) -> Compiled:
    try:
        return compiled(source)
    except (TemplateError, RecursionError) as error:
        raise DataError(f"the chat template is no Jinja: {_line(error)}") from error


def _alike(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _part(message: Row) -> Row:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _ensure_called(messages: list[Row], said: str) -> None:
    """Refuse a template that leaves calls out, as some do where there is content."""
    for message in messages:
        for name, arguments in calls_of(message):
            # JSON given to a template that writes JSON itself comes out quoted twice.
            given = arguments.strip() if isinstance(arguments, str) else ""
            if name not in said or given not in said:
                raise BadRow(f"the chat template leaves out a call of the tool '{name}'")


def _joined(spans: list[Span]) -> list[Span]:
    """Make one of spans that touch: a template may mark a turn and its end one by one."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _between(spans: list[Span], size: int) -> list[Span]:
    """Return what is left of a text without some spans."""
    cuts = [0, *(place for span in sorted(spans) for place in span), size]
    return list(zip(cuts[::2], cuts[1::2], strict=True))
