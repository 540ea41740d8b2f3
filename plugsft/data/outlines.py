"""Chats of one shape are compared with a server once; the words of others take their places.

To find what a server reads and writes, a chat is rendered twice for each answer (turns.py): a cost
that grows with the square of its length. But the words of a plain chat are all the same to a
template. So one chat of a shape (the roles) is rendered with places for words: its outline. Each
chat of the shape fills it, and must be equal to its own rendering, once.

A template may still look into words: for </think>, say. What it looks for stands in its source, and
is tried in a short chat, as is white space around the words of a role. Where that changes more than
itself, chats with it are rendered turn by turn. So is every chat whose number is a power of two,
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
Forms = dict[str, str]
"""Role -> what stands around {} in the contents of that role."""


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
    spaces: dict[tuple[str, str], str | None] = field(default_factory=dict)
    """Role, and white space around {} -> what of it the template writes; None if it depends."""
    filled: int = 0
    """Number of chats."""

    def find(self, chat: Conversation) -> RenderedChat:
        """Return the examples of a chat."""
        words = self._words(chat)
        outline = self._outline(chat, words) if words else None
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

    def _words(self, chat: Conversation) -> list[str]:
        """Return the words of each message as the template writes them; none of other chats."""
        if chat.tools is not None or chat.variables:
            return []
        words = []
        for message in chat.messages:
            content = message["content"]
            own = content.strip()
            if not own or len(message) != 2:
                return []
            if own != content:
                around = message["role"], content.replace(own, "{}", 1)
                if around not in self.spaces:
                    self.spaces[around] = self._try_space(chat, *around)
                form = self.spaces[around]
                if form is None:
                    return []
                own = form.format(own)
            words.append(own)
        return words

    def _try_space(self, chat: Conversation, role: str, around: str) -> str | None:
        """Return what of the white space around {} the template writes for a role."""
        for kept in (around, "{}", around.lstrip(), around.rstrip()):
            if self._is_filled(chat, {role: around}, {role: kept}):
                return kept
        return None

    def _outline(self, chat: Conversation, words: list[str]) -> Outline | None:
        """Return the outline for a chat with these words."""
        shape = repr(([message["role"] for message in chat.messages], chat.num_prompt, chat.flags))
        if shape not in self.known:
            if len(self.known) == MAX_OUTLINES:
                self.known = {}
            self.known[shape] = self._make(chat)
        everything = "\n".join(words)
        for text in [text for text in self.searched if text in everything]:
            self.searched.discard(text)
            one = _outlined(text)
            end = one.strip()
            form = f"{end} a{one}{{}}{one}a {end}".strip()
            forms = dict.fromkeys(("system", "user", "assistant"), form)
            if TAG_SIGNS.search(text) or not self._is_filled(chat, forms, forms):
                self.harmful.add(text)
        return None if any(map(everything.__contains__, self.harmful)) else self.known[shape]

    def _make(self, chat: Conversation) -> Outline | None:
        """Make the outline of a chat's shape; None where its words have no single place."""
        places = [f"{OPEN}{number}{CLOSE}" for number in range(len(chat.messages))]
        messages = [
            {**message, "content": place}
            for message, place in zip(chat.messages, places, strict=True)
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

    def _is_filled(self, chat: Conversation, forms: Forms, words: Forms) -> bool:
        """Tell whether a short chat of contents in forms is its outline with words in others."""
        roles = ["system"] * (chat.messages[0]["role"] == "system") + ["user", "assistant"] * 2

        def fill(forms: Forms) -> list[str]:
            return [forms.get(role, "{}").format(f"a{n}") for n, role in enumerate(roles)]

        pairs = zip(roles, fill(forms), strict=True)
        short = Conversation([{"role": role, "content": content} for role, content in pairs])
        try:
            outline, rendered = self._make(short), self.render(short)
        except BadRow:
            return False
        tried = not forms.keys().isdisjoint(roles)
        return tried and outline is not None and outline.fill(fill(words)) == rendered


def _outlined(text: str) -> str:
    """Return a text with {3} in place of the words of message 3."""
    return PLACE.sub(r"{\1}", text.replace("{", "{{").replace("}", "}}"))
