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
from typing import Any

from ..base.types import Row
from .formats import BadRow, Conversation, Parts

OPEN, CLOSE = "\u2045", "\u2046"
"""Around the number of a message while an outline is made: brackets that no template writes."""
PLACE = re.compile(f"{OPEN}(\\d+){CLOSE}")
TAG_SIGNS = re.compile(r"[<\[|]")
MAX_OUTLINES = 4096

Forms = dict[str, str]
"""Role -> what stands around {} in the contents of that role."""


@dataclass
class ChatExamples:
    """The examples of a conversation: one, or several chains."""

    examples: list[Parts]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outline:
    """The chats of a shape; {3} stands for the words of message 3."""

    whole: str
    """The chat as the template writes it."""
    examples: ChatExamples

    def fill(self, words: list[str]) -> ChatExamples:
        """The examples of the chat with these words."""
        filled = [[part.format(*words) for part in parts] for parts in self.examples.examples]
        return ChatExamples(filled, self.examples.warnings)


@dataclass
class Outlines:
    """The outlines of chats under one template."""

    write: Callable[[list[Row]], str]
    examples_by_turn: Callable[[Conversation], ChatExamples]
    """Finds the examples of a chat as a server would write each turn."""
    harmful: re.Pattern[str]
    """What changes more than itself where it stands among words: stop tokens, for instance."""
    searched: set[str]
    """What the template looks for, and has not been tried."""
    known: dict[tuple[Any, ...], Outline | None] = field(default_factory=dict)
    """Shape -> outline; None where there is none."""
    spaces: dict[tuple[str, str], str | None] = field(default_factory=dict)
    """Role, and white space around {} -> what of it the template writes; None if it depends."""
    filled: int = 0
    """Number of chats."""

    def examples(self, chat: Conversation) -> ChatExamples:
        """Find the examples of a chat."""
        words = self._words(chat)
        outline = self._outline(chat, words) if words else None
        if outline is None or outline.whole.format(*words) != self.write(chat.messages):
            return self.examples_by_turn(chat)
        self.filled += 1
        found = outline.fill(words)
        # The 1st, 2nd, 4th, 8th, ... is compared with the long way.
        if self.filled.bit_count() == 1 and found != self.examples_by_turn(chat):
            raise AssertionError(
                "the chat template looks into the words of a message in a way that plugsft does "
                "not foresee; please report it, with the template"
            )
        return found

    def _words(self, chat: Conversation) -> list[str]:
        """The words of each message as the template writes them; none of other chats."""
        if chat.tools is not None or chat.variables:
            return []
        words = []
        for message in chat.messages:
            content = message["content"]
            own = content.strip()
            if not own or len(message) != 2:
                return []
            if own != content:
                form = self._form(chat, message["role"], content.replace(own, "{}", 1))
                if form is None:
                    return []
                own = form.format(own)
            words.append(own)
        return words

    def _form(self, chat: Conversation, role: str, around: str) -> str | None:
        """What of the white space around {} the template writes for a role."""
        if (role, around) not in self.spaces:
            forms = (around, "{}", around.lstrip(), around.rstrip())
            kept = (form for form in forms if self._is_filled(chat, {role: around}, {role: form}))
            self.spaces[role, around] = next(kept, None)
        return self.spaces[role, around]

    def _outline(self, chat: Conversation, words: list[str]) -> Outline | None:
        """The outline for a chat with these words."""
        roles = (message["role"] for message in chat.messages)
        shape = (*roles, chat.num_prompt, *chat.flags.items())
        if shape not in self.known:
            if len(self.known) == MAX_OUTLINES:
                self.known.clear()
            self.known[shape] = self._make(chat)
        everything = "\n".join(words)
        for text in [text for text in self.searched if text in everything]:
            self.searched.discard(text)
            if TAG_SIGNS.search(text) or not self._changes_only_itself(chat, text):
                self.harmful = re.compile(f"{self.harmful.pattern}|{re.escape(text)}")
        return None if self.harmful.search(everything) else self.known[shape]

    def _changes_only_itself(self, chat: Conversation, text: str) -> bool:
        """Tell whether a text among the words of a short chat changes nothing else.

        It stands at both edges, alone and beside a word: "end a end {} end a end", for " end ".
        """
        one = _outlined(text)
        edge = one.strip()
        form = f"{edge} a{one}{{}}{one}a {edge}".strip()
        forms = dict.fromkeys(("system", "user", "assistant"), form)
        return self._is_filled(chat, forms, forms)

    def _make(self, chat: Conversation) -> Outline | None:
        """Make the outline of a chat's shape; None where its words have no single place."""
        places = [f"{OPEN}{number}{CLOSE}" for number in range(len(chat.messages))]
        contents = zip(chat.messages, places, strict=True)
        messages = [{**message, "content": place} for message, place in contents]
        try:
            found = self.examples_by_turn(replace(chat, messages=messages))
        except BadRow:
            return None
        examples = [[*map(_outlined, parts)] for parts in found.examples]
        whole = _outlined(self.write(messages))
        outline = Outline(whole, ChatExamples(examples, found.warnings))
        return outline if outline.fill(places) == found else None

    def _is_filled(self, chat: Conversation, given: Forms, expected: Forms) -> bool:
        """Tell whether a short chat with given contents is its outline with the expected words."""
        roles = ["system"] * (chat.messages[0]["role"] == "system") + ["user", "assistant"] * 2
        if given.keys().isdisjoint(roles):
            return False
        contents, words = (
            [forms.get(role, "{}").format(f"a{n}") for n, role in enumerate(roles)]
            for forms in (given, expected)
        )
        turns = zip(roles, contents, strict=True)
        short = Conversation([{"role": role, "content": content} for role, content in turns])
        try:
            outline, found = self._make(short), self.examples_by_turn(short)
        except BadRow:
            return False
        return outline is not None and outline.fill(words) == found


def _outlined(text: str) -> str:
    """A text with {3} in place of the words of message 3."""
    return sys.intern(PLACE.sub(r"{\1}", text.replace("{", "{{").replace("}", "}}")))
