"""What a chat template makes of a sample's conversations."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ...base.types import Row
from ...data.chat import Chat
from ...data.formats import TEXTS, format_of, read_chat
from ...data.jsonl import name_rows
from ...data.messages import BadRow, Conversation
from ...data.render import renamed, without
from ...data.sample import Sample
from ...data.slices import ShardWriter
from ...data.sources import OpenSource, read_lead_row
from ...registry.active import Active


def judge_chats(
    sample: Sample, work: ShardWriter, opened: OpenSource, active: Active
) -> tuple[str, list[str]]:
    """Count the chats that are one example; warn of text that the template drops."""
    if any(active.implements(name, ["render"]) for name in active.plugins):
        return "", []
    count, unrolled, with_special = 0, 0, dict[int, str]()
    dropped: dict[str, list[int]] = defaultdict(list)
    special = special_tokens(work)
    chat = Chat(work.tokenizer, work.data)
    for number, conversation in conversations(sample, work, opened):
        try:
            texts = chat.render(conversation).texts
        except BadRow:
            continue
        text = "\n".join(text for text, _ in texts)
        count += 1
        unrolled += len(texts) > 1
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
    served = f"{count:,} chats as the template writes them for a server"
    if unrolled:
        served += f"; {unrolled:,} with an example for each trained turn, since the template writes"
        served += " a turn otherwise once others follow"
    return served if count else "", warnings


def conversations(
    sample: Sample, work: ShardWriter, opened: OpenSource
) -> Iterator[tuple[int, Conversation]]:
    """Yield the number and the conversation of each row that holds one."""
    kind = format_of(read_lead_row(opened, work.data))
    if kind is None or kind in TEXTS:
        return
    for numbers in sample.ranges:
        rows = opened.read(numbers.start, numbers.stop)
        for number, row in zip(numbers, rows, strict=True):
            if row is not None:
                named = renamed(without(row, work.data.ignore), work.data.columns)
                with suppress(BadRow):
                    yield number, read_chat(kind, named)


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
    return dropped
