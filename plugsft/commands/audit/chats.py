"""What a chat template makes of a sample's conversations."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

from ...data.chat import Chat
from ...data.formats import TEXTS, format_of, read_chat
from ...data.jsonl import name_rows
from ...data.messages import BadRow, Conversation
from ...data.prepare import describe_unrolled
from ...data.render import renamed, without
from ...data.sample import Sample
from ...data.slices import ShardWriter
from ...data.sources import OpenSource, read_lead_row
from ...registry.active import Active


def judge_chats(
    sample: Sample, work: ShardWriter, opened: OpenSource, active: Active
) -> tuple[str, list[str]]:
    """Describe how many chats are trained, as how many examples; warn of text that is dropped."""
    if any(active.implements(name, ["render"]) for name in active.plugins):
        return "", []
    trained, with_special = {*sample.tokens.rows.tolist()}, dict[int, str]()
    count = 0
    dropped: dict[str, list[int]] = defaultdict(list)
    special = special_tokens(work)
    chat = Chat(work.tokenizer, work.data)
    for number, conversation in conversations(sample, work, opened):
        try:
            rendered = chat.render(conversation)
        except BadRow:
            continue
        text = "\n".join(text for text, _ in rendered.texts)
        count += number in trained
        for message in conversation.messages:
            if (message.get("content") or "").strip() not in text:
                dropped[message["role"]].append(number)
        contents = "\n".join(message.get("content") or "" for message in conversation.messages)
        if match := special.search(contents):
            with_special[number] = match[0]
    rows = opened.part(0, len(opened))
    warnings = [
        f"{name_rows(numbers, rows)}: the chat template drops words of the {role}"
        for role, numbers in sorted(dropped.items())
    ]
    if with_special:
        warnings.append(
            f"{name_rows([*with_special], rows)}: the text contains special tokens, such as "
            f"'{next(iter(with_special.values()))}', which the model reads as control tokens"
        )
    unrolled = sample.shard.unrolled
    how = describe_unrolled(unrolled) if unrolled else "each is one example"
    return f"{count:,}; {how}" if count else "", warnings


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
