"""What a chat template makes of a sample's conversations."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ...base.types import Row
from ...data.chat import Chat
from ...data.formats import TEXTS, format_of, read_chat
from ...data.jsonl import name_rows
from ...data.messages import BadRow, Conversation, call_variants
from ...data.render import renamed, without
from ...data.sample import Sample
from ...data.slices import ShardWriter
from ...data.sources import OpenSource
from ...registry.active import Active

MAX_CHECKED = 32
"""Most answers of a chat that `is_stable` checks."""


class AuditedChat(Chat):
    """Also tells whether training and generation see the same text."""

    def is_stable(self, chat: Conversation) -> bool:
        """Return whether the text before each answer is the prompt that generation would use.

        Checks a sample of a long chat's answers: each needs a rendering of all turns before it.
        """
        variables = self._variables_of(chat)
        for messages in call_variants(chat.messages):
            answers = [n for n, turn in enumerate(messages) if n and turn["role"] == "assistant"]
            answers = answers[-1:] if self.train_on == "last" else answers
            answers = answers[:: -(-len(answers) // MAX_CHECKED) or 1]
            try:
                text, _ = self._render(chat, messages)
                prompts = [self.write_prompt(messages[:n], variables) for n in answers]
            except BadRow:
                continue
            return all(text.startswith(prompt) for prompt in prompts)
        return True


def judge_chats(
    sample: Sample, work: ShardWriter, opened: OpenSource, active: Active
) -> tuple[str, list[str]]:
    """Count the stable conversations; warn of text that the template drops or changes."""
    if any(active.implements(name, ["render"]) for name in active.plugins):
        return "", []
    count, unstable, with_special = 0, list[int](), dict[int, str]()
    dropped: dict[str, list[int]] = defaultdict(list)
    special = special_tokens(work)
    chat = AuditedChat(work.tokenizer, work.data)
    for number, conversation in conversations(sample, work, opened):
        try:
            text, spans = chat.render(conversation)
            if not any(stop > start for start, stop in spans):
                continue
            if not chat.is_stable(conversation):
                unstable.append(number)
        except BadRow:
            continue
        count += 1
        for part in dropped_parts(conversation.messages, text):
            dropped[part].append(number)
        contents = "\n".join(message.get("content") or "" for message in conversation.messages)
        if match := special.search(contents):
            with_special[number] = match[0]
    rows = opened.part(0, len(opened))
    warnings = [
        f"{name_rows(numbers, rows)}: the chat template drops {part}"
        for part, numbers in sorted(dropped.items())
    ]
    if with_special:
        warnings.append(
            f"{name_rows([*with_special], rows)}: the text contains special tokens, such as "
            f"'{next(iter(with_special.values()))}', which the model reads as control tokens"
        )
    if unstable:
        warnings.append(
            f"{name_rows(unstable, rows)}: the text before an answer is not the prompt that the "
            "chat template makes for generation, so training differs from use"
        )
    stable = (
        f"{count - len(unstable):,} of {count:,} chats are stable: each answer follows the prompt "
        "that the template makes for generation"
    )
    return stable if count else "", warnings


def conversations(
    sample: Sample, work: ShardWriter, opened: OpenSource
) -> Iterator[tuple[int, Conversation]]:
    """Yield the number and the conversation of each row that holds one."""
    for numbers in sample.ranges:
        rows = {
            number: renamed(without(row, work.data.ignore), work.data.columns)
            for number, row in zip(numbers, opened.read(numbers.start, numbers.stop), strict=True)
            if row is not None
        }
        kind = format_of([*rows.values()])
        if kind is None or kind in TEXTS:
            continue
        for number, row in rows.items():
            try:
                yield number, read_chat(kind, row)
            except BadRow:
                continue


def special_tokens(work: ShardWriter) -> re.Pattern[str]:
    """Return a pattern that matches the tokenizer's special tokens."""
    added = work.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return re.compile(
        "|".join(re.escape(token.content) for token in added if token.special) or "$^"
    )


def dropped_parts(messages: Sequence[Row], text: str) -> set[str]:
    """Name the parts of messages that their text does not contain."""
    dropped = set()
    for message in messages:
        if (message.get("content") or "").strip() not in text:
            dropped.add(f"words of the {message['role']}")
        if str(message.get("reasoning_content") or "").strip() not in text:
            dropped.add(f"the reasoning of the {message['role']}")
    return dropped
