"""Chats of one shape are compared with a server once; the words of others take their places.

To find what a server reads and writes, a chat is rendered twice for each answer (turns.py): a cost
that grows with the square of its length. But the words of a plain chat are all the same to a
template. So one chat of a shape (the roles) is rendered with places for words: its outline. Each
chat of the shape fills it, and must be equal to its own rendering, once. White space around words
is tried in a short chat: where the template keeps it or strips it everywhere, it is of the words,
else of the shape.

A template may still look into words: for </think>, say. What it looks for stands in its source, and
a chat with such words is rendered turn by turn. So is every chat whose number is a power of two,
and compared.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from ..base.types import Row, Span
from .formats import BadRow, Conversation

OPEN, CLOSE = "\u2045", "\u2046"
"""Around the number of a message while an outline is made: brackets that no template writes."""
PLACE = re.compile(f"{OPEN}(\\d+){CLOSE}")
TAG_SIGNS = re.compile(r"[<\[|]")
MAX_OUTLINES = 4096

Text = tuple[str, list[Span]]


@dataclass
class RenderedChat:
    """The examples of a conversation: one, or one for each trained turn."""

    texts: list[Text]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outline:
    """The examples of all chats of a shape; {3} stands for the words of message 3."""

    whole: str
    """The chat as the template writes it."""
    texts: list[list[str]]
    """The parts of each example: not trained and trained in turn."""
    warnings: list[str]

    def fill(self, words: list[str]) -> RenderedChat:
        """Return the examples of a chat with these words."""
        texts = []
        for parts in self.texts:
            filled = [part.format(*words) for part in parts]
            ends = [*accumulate(map(len, filled), initial=0)]
            texts.append(("".join(filled), list(zip(ends[1::2], ends[2::2], strict=False))))
        return RenderedChat(texts, self.warnings)


@dataclass
class Outlines:
    """The outlines of chats under one template."""

    write: Callable[[list[Row]], str]
    render: Callable[[Conversation], RenderedChat]
    """Renders a chat as a server would, turn by turn."""
    harmful: set[str]
    """What changes more than itself where it stands among words: stop tokens, for instance."""
    searched: set[str]
    """What the template looks for, and has not been tried."""
    known: dict[str, Outline | None] = field(default_factory=dict)
    """Shape -> outline; None where there is none."""
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    """White space around {} -> what of it is of the words, and what is of the shape."""
    filled: int = 0
    """Number of chats."""

    def find(self, chat: Conversation) -> RenderedChat:
        """Return the examples of a chat."""
        own = [str(message.get("content") or "").strip() for message in chat.messages]
        if not _is_plain(chat, own):
            return self.render(chat)
        places = [self._split(chat, *pair) for pair in zip(chat.messages, own, strict=True)]
        words, around = map(list, zip(*places, strict=True))
        outline = self._outline(chat, words, around)
        if outline is None or outline.whole.format(*words) != self.write(chat.messages):
            return self.render(chat)
        rendered = outline.fill(words)
        self.filled += 1
        if self.filled & (self.filled - 1) == 0 and rendered != self.render(chat):
            raise AssertionError(
                "the chat template looks into the words of a message in a way that plugsft does "
                "not foresee; please report it, with the template"
            )
        return rendered

    def _split(self, chat: Conversation, message: Row, own: str) -> tuple[str, str]:
        """Return a message's words, with white space that is of them, and the rest around {}."""
        if own == message["content"]:
            return own, "{}"
        around = message["content"].replace(own, "{}", 1)
        if around not in self.spaces:
            kinds = ((kept, "{}") for kept in (around, "{}") if self._is_filled(chat, around, kept))
            self.spaces[around] = next(kinds, ("{}", around))
        kept, rest = self.spaces[around]
        return kept.format(own), rest

    def _outline(self, chat: Conversation, words: list[str], around: list[str]) -> Outline | None:
        """Return the outline for a chat."""
        roles = [message["role"] for message in chat.messages]
        shape = repr((roles, around, chat.num_prompt, chat.flags))
        if shape not in self.known:
            if len(self.known) == MAX_OUTLINES:
                self.known = {}
            self.known[shape] = self._make(chat, around)
        everything = "\n".join(words)
        for text in [text for text in self.searched if text in everything]:
            self.searched.discard(text)
            one = _outlined(text)
            end = one.strip()
            form = f"{end} a{one}{{}}{one}a {end}".strip()
            if TAG_SIGNS.search(text) or not self._is_filled(chat, form, form):
                self.harmful.add(text)
        return None if any(map(everything.__contains__, self.harmful)) else self.known[shape]

    def _make(self, chat: Conversation, around: list[str]) -> Outline | None:
        """Make the outline of a chat's shape; None where its words have no single place."""
        places = [f"{OPEN}{number}{CLOSE}" for number in range(len(around))]
        messages = [
            {**message, "content": form.format(place)}
            for message, form, place in zip(chat.messages, around, places, strict=True)
        ]
        try:
            rendered = self.render(replace(chat, messages=messages))
        except BadRow:
            return None
        texts = []
        for text, spans in rendered.texts:
            cuts = [0, *(end for span in spans for end in span), len(text)]
            parts = [text[cut:end] for cut, end in pairwise(cuts)]
            texts.append([sys.intern(_outlined(part)) for part in parts])
        outline = Outline(_outlined(self.write(messages)), texts, rendered.warnings)
        return outline if outline.fill(places) == rendered else None

    def _is_filled(self, chat: Conversation, form: str, words: str) -> bool:
        """Tell whether a short chat of contents in a form is its outline with words in a form."""
        roles = ["system"] * (chat.messages[0]["role"] == "system") + ["user", "assistant"] * 2
        messages = [
            {"role": role, "content": form.format(f"a{number}")}
            for number, role in enumerate(roles)
        ]
        short = Conversation(messages)
        outline = self._make(short, ["{}"] * len(roles))
        try:
            rendered = self.render(short)
        except BadRow:
            return False
        filled = [words.format(f"a{number}") for number in range(len(roles))]
        return outline is not None and outline.fill(filled) == rendered


def _is_plain(chat: Conversation, words: list[str]) -> bool:
    return (
        chat.tools is None
        and not chat.variables
        and all(words)
        and all(len(message) == 2 for message in chat.messages)
    )


def _outlined(text: str) -> str:
    """Return a text with {3} in place of the words of message 3."""
    return PLACE.sub(r"{\1}", text.replace("{", "{{").replace("}", "}}"))
