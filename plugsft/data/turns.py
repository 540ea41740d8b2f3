"""What a served model reads and writes at a turn of a chat, found by what a template does.

A server renders the messages before the turn with `add_generation_prompt`: the prompt. The model
then writes the answer up to a stop token. No template says where its answers begin and end, and
few write an answer as it is served once other turns follow. So no template is recognized, and none
is searched for marks: each is rendered as a server would, and compared with itself.

    prompt     the messages before the turn, with the generation prompt
    written    the messages up to and with the turn
    others     the same, where the turn has other words: what differs depends on the answer

The answer is the rest of `written` where this begins with the prompt. Otherwise see `_begin`. It
ends with the first stop token behind its last word, wherever the template writes that token.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from json import dumps
from typing import Any

from ..base.types import Row
from ..tokens.ends import ASK
from .formats import REASONING, BadRow, Parts

Write = Callable[[list[Row], bool], str]
"""(messages, whether to add the generation prompt) -> text."""
Found = tuple[Row, str, str]
"""A turn, the text of the messages up to and with it, and the answer at the end of this text.

The turn may hold its thought otherwise than in the row, so that the template writes the prompt."""
THOUGHT = "!a thought that no row has!"
"""Stands for a thought, to see where a template writes it."""
TAG = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{3,20}\]")
"""Tokens such as <think>, <|im_end|>, [/THINK]."""
OPENING = re.compile(r"(<[^<>\s/][^<>\s]{0,39}>|\[[A-Z_]{3,20}\])\s*$")
"""The tag that ends a prompt and may leave a thought open."""
CLOSED = re.compile(r"(<[^<>\s]{1,40}>[^<>]*<[^<>\s]{1,40}>|</[^<>\s]{1,40}>)\s*$")
"""A block that ends a text and is closed: <think></think>, </think>."""
ENDED = re.compile(r"</think[^<>]*>\s*$")
ENDS_THOUGHT = "ends the thought in its prompt, and the turn has one"
BEGUN = re.compile(r"<[^<>\s]{0,40}$")
"""The beginning of a tag that ends a text."""
TAG_BEFORE = re.compile(r"<[^<>\s]{1,40}>$")
RESULT: Row = {
    "role": "tool",
    "name": "look_up",
    "tool_call_id": "abcdef123",
    "content": "!result!",
}


class Refused(BadRow):
    """A chat that the template does not write as it is served: what the template does.

    `Chat.examples_by_turn` adds the cure.
    """


@dataclass(frozen=True)
class TurnFinder:
    """Finds the prompt and the answer of turns."""

    write: Write
    special: Sequence[str]
    """The tokenizer's added tokens."""
    stop: re.Pattern[str]
    """Finds a token that ends an answer."""
    end: str
    """The stop token of templates that write none."""
    _no_thoughts: set[str] = field(default_factory=set)
    """Ends of prompts that leave no thought open: a header such as <|assistant|>."""

    def find(self, messages: list[Row], number: int) -> Parts:
        """Find the prompt of an assistant's turn, and the answer with the token that ends it."""
        before, turn = messages[:number], messages[number]
        ensure_values(self.write, messages[: number + 1], number)
        prompt = self.write(before, True)
        found = self._find_answer(before, turn, prompt)
        if found is None:
            return self.find([*before, _without_thought(turn), *messages[number + 1 :]], number)
        turn, written, answer = found
        if answer.lstrip().startswith("<think>") and ENDED.search(prompt):
            raise Refused(ENDS_THOUGHT)
        last = self._end_of_words(before, turn, written, answer)
        if self.stop.search(answer[:last]) and not self.stop.search(str(turn)):
            raise Refused("ends the turn before its last word")
        answer = self._stop(messages, number, written, answer, last)
        if turn["content"].rpartition("</think>")[2].strip() not in answer:
            raise Refused("leaves out words of the assistant")
        return [prompt, answer]

    def _find_answer(self, before: list[Row], turn: Row, prompt: str) -> Found | None:
        """Find what the template writes behind the prompt.

        None if the prompt opens a thought, and the template leaves that of the turn out.
        """
        ending = OPENING.search(prompt[-60:])
        opening = ending[0] if ending else ""
        if opening and not thoughts_of(turn):
            closed = self._close_thought(before, turn, prompt, opening)
            if closed is not None:
                return closed
        written = self.write([*before, turn], False)
        if not written.startswith(prompt):
            turn, written = self._split_thought(before, turn, prompt) or (turn, written)
        start = len(prompt)
        if not written.startswith(prompt):
            start = self._begin(before, turn, prompt, written)
        answer, thoughts = written[start:], thoughts_of(turn)
        if opening and thoughts:
            answer = _without_opening(answer, opening)
            if not any(thought in answer for thought in thoughts):
                return None
        return turn, written, answer

    def _begin(self, before: list[Row], turn: Row, prompt: str, written: str) -> int:
        """Find where the answer begins in a text that does not begin with the prompt.

        As where a template writes its rules once more before the last question:

            prompt     rules, first <|user|> rules, last <|assistant|>
            written    rules, first <|user|> last <|assistant|> answer
            parted     where these two part: at the second "rules"
            depends    where `written` begins to depend on the answer
        """
        depends = common_prefix(written, self._others(before, turn))
        parted = min(common_prefix(prompt, written), depends)
        parted = len(BEGUN.sub("", prompt[:parted]))  # they part before a tag, not within it
        start = self._behind_header(prompt, written, parted, depends)
        if start is not None:
            return start
        ensure_empty_thought(turn, prompt[parted:], written[parted:depends])
        return parted

    def _behind_header(self, prompt: str, written: str, parted: int, depends: int) -> int | None:
        """Find the end of the header before the answer, where earlier turns are written otherwise.

        A header is the end of the prompt from one of the tokenizer's own tokens on.
        """
        # It may begin with the tag before the place where the two texts part.
        first, begin = len(TAG_BEFORE.sub("", prompt[:parted])), len(prompt)
        while True:
            begin = max((prompt.rfind(token, 0, begin) for token in self.special), default=-1)
            if begin < first:
                return None
            header = prompt[begin:]
            if (place := written.rfind(header, parted, depends)) >= 0:
                return place + len(header)

    def _close_thought(
        self, before: list[Row], turn: Row, prompt: str, opening: str
    ) -> Found | None:
        """Find the answer that closes the thought which the prompt leaves open.

        The turn gets a thought to find it. None if the prompt leaves no thought open.
        """
        if opening in self._no_thoughts:
            return None
        places = [False] if turn.get("tool_calls") else [False, True]
        for inline in places:
            thoughtful = with_thought(turn, THOUGHT, inline)
            with suppress(Refused):
                written = self.write([*before, thoughtful], False)
                rest = _without_opening(written.removeprefix(prompt), opening)
                if written.startswith(prompt) and rest.lstrip().startswith(THOUGHT):
                    return thoughtful, written, rest.replace(THOUGHT, "", 1)
        self._no_thoughts.add(opening)
        return None

    def _split_thought(self, before: list[Row], turn: Row, prompt: str) -> tuple[Row, str] | None:
        """Give a turn its <think> text as a field, if the template then writes the prompt.

        The prompt has the opening tag already.
        """
        thought, closing, content = turn["content"].partition("</think>")
        if not closing or "<think>" not in thought:
            return None
        split = with_thought({**turn, "content": content.strip()}, _plain(thought))
        written = self.write([*before, split], False)
        return (split, written) if written.startswith(prompt) else None

    def _end_of_words(self, before: list[Row], turn: Row, written: str, answer: str) -> int:
        """Find where the answer's last word ends."""
        words = turn["content"].strip()
        if words and not turn.get("tool_calls") and answer.startswith(words):
            rest = answer[len(words) :].lstrip()
            if not rest or any(map(rest.startswith, self.special)):
                return len(words)
        others = self._others(before, turn)
        return max(0, len(answer) - common_prefix(written[::-1], others[::-1]))

    def _others(self, before: list[Row], turn: Row) -> str:
        """The text with other words in place of the turn's."""
        return write_others(self.write, [*before, turn], [len(before)])

    def _stop(self, messages: list[Row], number: int, written: str, answer: str, last: int) -> str:
        """Cut the answer behind its stop token, or add that."""
        if stop := self.stop.search(answer, last):
            return answer[: stop.end()]
        # Some templates write it only before the next message.
        if THOUGHT in written:
            written = self.write(messages[: number + 1], False)
        words = written[: len(written) - len(answer) + last]
        # The row's next message has other words: the token does not depend on what follows.
        followers = [{**turn, "content": "!next!"} for turn in messages[number + 1 : number + 2]]
        if messages[number].get("tool_calls"):
            followers.append(RESULT)
        followers.append(ASK)
        for follower in followers if words.endswith(answer[:last]) else []:
            with suppress(Refused):
                longer = self.write([*messages[: number + 1], follower], False)
                rest = longer.removeprefix(words)
                stop = self.stop.search(rest) if longer.startswith(words) else None
                # A stop token behind the next message's words is that message's own.
                if stop and follower["content"] not in rest[: stop.start()]:
                    return answer[:last] + rest[: stop.end()]
        answer = answer.rstrip()
        if len(answer) > last and answer.endswith(tuple(self.special)):
            return answer
        return answer + self.end


def ensure_empty_thought(turn: Row, block: str, between: str) -> None:
    """Refuse a prompt that ends otherwise than with an empty thought, which the answer lacks.

    `block` is the end of the prompt; `between` is written in its place, before the answer.
    """
    closed = CLOSED.search(block)
    if closed and thoughts_of(turn):
        raise Refused(ENDS_THOUGHT)
    # Only a call may begin with words that do not depend on it.
    words = "" if turn.get("tool_calls") else TAG.sub("", between).strip()
    if not closed or closed.start() or words:
        raise Refused(f"asks for the answer with {block[-60:]!r}, and then writes it otherwise")


def common_prefix(first: Any, second: Any) -> int:
    """The length of the common prefix of two texts or lists."""
    same, longest = 0, min(len(first), len(second))
    while same < longest:
        middle = (same + longest + 1) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            longest = middle - 1
    return same


def with_thought(turn: Row, thought: str, inline: bool = False) -> Row:
    """Give a turn a thought, in the fields that templates read or in its text."""
    if inline:
        content = turn["content"]
        return {**turn, "content": f"<think>\n{thought}\n</think>\n\n{content}"}
    return {**turn, "reasoning_content": thought, "thinking": thought}


def thoughts_of(turn: Row) -> list[str]:
    """The thoughts that a turn holds, in fields or in its text."""
    text, closing, _ = turn["content"].rpartition("</think>")
    texts = [str(turn[name]).strip() for name in REASONING if turn.get(name)]
    return [*texts, *([_plain(text)] if closing else [])]


def _without_thought(turn: Row) -> Row:
    rest = {name: value for name, value in turn.items() if name not in REASONING}
    content = turn["content"]
    return {**rest, "content": content.rpartition("</think>")[2].lstrip()}


def _without_opening(answer: str, opening: str) -> str:
    """Take the tag with which the prompt ends already from an answer."""
    rest = answer.lstrip().removeprefix(opening.strip())
    return rest.lstrip() if len(rest) < len(answer.lstrip()) else answer


def write_others(write: Write, messages: list[Row], numbers: Collection[int]) -> str:
    """Write a chat with other words in some of its messages; refuse a template that loses one.

    No other text has these words. Their first and last letters differ from those of the turn's:
    where two texts part, the turn's words begin. Only thoughts may be left out.
    """
    stand_for: dict[str, str] = {}

    def other(text: str, what: str) -> str:
        words = text.strip()
        first, last = ("q" if edge == "z" else "z" for edge in (words[:1], words[-1:]))
        word = f"{first}other{len(stand_for)}{last}"
        stand_for[word] = what
        return word

    def other_value(value: Any) -> Any:
        if isinstance(value, dict):
            names = (other(name, f"the argument's name {name!r} of a call") for name in value)
            return dict(zip(names, map(other_value, value.values()), strict=True))
        if isinstance(value, list):
            return [*map(other_value, value)]
        if isinstance(value, str) and value:
            return other(value, f"{value!r} of a call")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value:
            return value  # `ensure_values` looks at these
        number = 97531 + 10 * len(stand_for)
        stand_for[str(number)] = f"{value!r} of a call"
        return type(value)(number)

    def other_function(function: Row) -> Row:
        return {key: other_value(value) for key, value in function.items()}

    def other_turn(turn: Row) -> Row:
        changed = {**turn}
        for name in REASONING:
            if turn.get(name):
                changed[name] = other(str(turn[name]), THOUGHT)
        thought, closing, content = turn["content"].rpartition("</think>")
        if content.strip():
            content = other(content, f"words of the {turn['role']}")
        changed["content"] = content
        if closing:
            changed = with_thought(changed, other(_plain(thought), THOUGHT), inline=True)
        if turn.get("tool_calls"):
            calls = turn["tool_calls"]
            changed["tool_calls"] = [
                {**call, "function": other_function(call["function"])} for call in calls
            ]
        return changed

    others = [*messages]
    for number in numbers:
        others[number] = other_turn(messages[number])
    text = write(others, False)
    for word, what in stand_for.items():
        if word not in text and what != THOUGHT:
            raise Refused(f"leaves out {what}")
    return text


def ensure_values(write: Write, messages: list[Row], number: int) -> None:
    """Refuse a template that leaves out a value of a call for which no other word can stand.

    Where it is another, the text must be, too. Whether it is left out with its name shows where
    the name is another.
    """
    turn, text = deepcopy(messages[number]), ""
    chat = [*messages[:number], turn, *messages[number + 1 :]]
    for call in turn.get("tool_calls", ()):
        for values, name in _without_words(call["function"]["arguments"]):
            value, text = values[name], text or write(chat, False)
            for other in (not value, ""):
                values[name] = other
                try:
                    lost = other != value and write(chat, False) == text
                except Refused:
                    lost = False
                if lost:
                    raise Refused(f"leaves out {dumps(value)}, the value of {name!r} in a call")
            values[name] = value


def _without_words(values: Any) -> Iterator[tuple[Any, Any]]:
    """Find what is true or empty in objects and lists: the one that it is in, and its name."""
    for name in values if isinstance(values, dict) else range(len(values)):
        inner = values[name]
        if isinstance(inner, dict | list) and inner:
            yield from _without_words(inner)
        elif inner is True or not inner:
            yield values, name


def _plain(thought: str) -> str:
    return thought.replace("<think>", "", 1).strip()
