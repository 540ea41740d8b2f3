"""Chats of one shape are compared with a server once; the words of others take their places.

To find what a server reads and writes, a chat is rendered twice for each answer (turns.py): a cost
that grows with the square of its length. But the words of a plain chat are all the same to a
template. So one chat of a shape (roles, and white space around words) is rendered with places for
words: its outline. Each chat of the shape fills it, and must be equal to its own rendering, once.

A template may still look into words: for </think>, say. What it looks for stands in its source, and
a chat with such words is rendered turn by turn. So is every chat whose number is a power of two,
and compared.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ..base.types import Row, Span
from .messages import BadRow, Conversation
from .turns import Turn

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
    render: Callable[..., RenderedChat]
    """Renders a chat as a server would, turn by turn, but for turns that are known."""
    harmful: set[str]
    """What changes more than itself where it stands among words: stop tokens, for instance."""
    searched: set[str]
    """What the template looks for, and has not been tried."""
    known: dict[str, Outline | None] = field(default_factory=dict)
    """Shape -> outline; None where there is none."""
    turns: dict[str, Turn] = field(default_factory=dict)
    """The beginning of a chat with places for words -> its last turn."""
    filled: int = 0
    """Number of chats."""

    def find(self, chat: Conversation) -> RenderedChat:
        """Return the examples of a chat."""
        words = [str(message.get("content") or "").strip() for message in chat.messages]
        outline = self._outline(chat, words) if _is_plain(chat, words) else None
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

    def _outline(self, chat: Conversation, words: list[str]) -> Outline | None:
        """Return the outline for a chat."""
        around = [
            message["content"].split(own, 1)
            for message, own in zip(chat.messages, words, strict=True)
        ]
        roles = [message["role"] for message in chat.messages]
        shape = repr((roles, around, chat.num_prompt, chat.flags))
        if shape not in self.known:
            if len(self.known) == MAX_OUTLINES:
                self.known = {}
                self.turns = {}
            self.known[shape] = self._make(chat, words)
        everything = "\n".join(words)
        for text in [text for text in self.searched if text in everything]:
            self.searched.discard(text)
            if TAG_SIGNS.search(text) or not self._is_harmless(text, chat):
                self.harmful.add(text)
        if any(text in everything for text in self.harmful):
            return None
        return self.known[shape]

    def _make(self, chat: Conversation, words: list[str]) -> Outline | None:
        """Make the outline of a chat's shape; None where its words have no single place."""
        places = [f"{OPEN}{number}{CLOSE}" for number in range(len(words))]
        sample = _with_words(chat, words, places)
        try:
            rendered = self.render(sample, self.turns)
        except BadRow:
            return None
        texts = []
        for text, spans in rendered.texts:
            cuts = [0, *(end for span in spans for end in span), len(text)]
            parts = [text[cut:end] for cut, end in pairwise(cuts)]
            texts.append([sys.intern(_outlined(part)) for part in parts])
        outline = Outline(_outlined(self.write(sample.messages)), texts, rendered.warnings)
        return outline if outline.fill(places) == rendered else None

    def _is_harmless(self, text: str, chat: Conversation) -> bool:
        """Tell whether a text may stand among the words: a short chat with it fills its outline."""
        roles = [message["role"] for message in chat.messages[:1] if message["role"] == "system"]
        roles += ["user", "assistant"] * 2
        short = Conversation([{"role": role, "content": "a"} for role in roles])
        outline = self._make(short, ["a"] * len(roles))
        end = text.strip()
        words = [f"{end} a{text}{number}{text}a {end}".strip() for number in range(len(roles))]
        try:
            rendered = self.render(_with_words(short, ["a"] * len(roles), words))
        except BadRow:
            return False
        return outline is not None and outline.fill(words) == rendered


def _is_plain(chat: Conversation, words: list[str]) -> bool:
    if chat.tools is not None or chat.variables:
        return False
    return all(words) and all(len(message) == 2 for message in chat.messages)


def _with_words(chat: Conversation, words: list[str], others: list[str]) -> Conversation:
    messages = [
        {**message, "content": message["content"].replace(own, other, 1)}
        for message, own, other in zip(chat.messages, words, others, strict=True)
    ]
    return Conversation(messages, flags=chat.flags, num_prompt=chat.num_prompt)


def _outlined(text: str) -> str:
    """Return a text with {3} in place of the words of message 3."""
    return PLACE.sub(r"{\1}", text.replace("{", "{{").replace("}", "}}"))
