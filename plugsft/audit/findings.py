"""Findings about rows, which `check` and `inspect` share, and the lines of `plugsft check`."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.text import Text

from ..base.console import out
from ..base.errors import PlugsftError
from ..base.types import Rows
from ..data.chat import Chat
from ..data.formats import TEXTS, BadRow, Conversation, format_of, read_chat
from ..data.jsonl import name_rows
from ..data.prepare import describe_unrolled
from ..data.render import renamed, without
from ..data.sample import Sample
from ..data.slices import CURE_LONG, ShardWriter, cure_bad, describe_warnings
from ..data.sources import OpenSource, read_lead_row
from ..recipe.tables import Data
from ..registry.active import Active

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Findings:
    """Print a line per subject, and collect problems until the end."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def ok(self, subject: str, text: str) -> None:
        """Print that a subject is fine."""
        self._line("ok", subject, text)

    def warn(self, subject: str, text: str) -> None:
        """Warn of something that works but may be a mistake."""
        self._line("warn", subject, text)

    @contextmanager
    def about(self, subject: str) -> Iterator[None]:
        """Collect errors of the body, so that the checks go on."""
        try:
            yield
        except PlugsftError as error:
            new = [line for line in str(error).splitlines() if line not in self.problems]
            self.problems += new
            if new:
                self._line(
                    "fail", subject, "see the end" if len(new) == 1 else f"{len(new)} problems"
                )

    def _line(self, mark: str, subject: str, text: str) -> None:
        out.print(Text.assemble((f"{mark:<6}", STYLES[mark]), f"{subject:<12}", text))


def judge_rows(
    sample: Sample, rows: Rows, data: Data, cut: str = "cut", dropped: str = "; dropped"
) -> tuple[list[str], list[str]]:
    """Name the rows that stop the run, then those that are dropped, cut or unusual."""
    shard, errors, bad = sample.shard, list[str](), list[str]()
    warnings = describe_warnings(shard.warnings, rows)
    for reason, numbers in sorted(shard.bad.items(), key=lambda item: item[1]):
        text = f"{name_rows(numbers, rows)}: {reason}"
        bad.append(text)
        if data.on_bad_row == "error":
            errors.append(text + cure_bad({reason: numbers}))
        else:
            warnings.append(text + dropped)
    for numbers, fate in ((shard.too_long, "dropped"), (shard.truncated, cut)):
        text = f"{name_rows(numbers, rows)}: longer than data.max_length = {data.max_length:,}"
        if numbers and data.too_long == "error":
            errors.append(text + CURE_LONG)
        elif numbers:
            warnings.append(f"{text}; {fate}")
    if not shard.examples:
        why = "; ".join(bad) or f"all are longer than data.max_length = {data.max_length:,}"
        cure = cure_bad(shard.bad, drop=False)
        return [f"no row has a token to train on: {why}{cure}"], []
    return errors, warnings


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
            if isinstance(row, dict):
                named = renamed(without(row, work.data.ignore), work.data.columns)
                with suppress(BadRow):
                    yield number, read_chat(kind, named)


def special_tokens(work: ShardWriter) -> re.Pattern[str]:
    """Return a pattern that matches the tokenizer's special tokens."""
    added = work.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return re.compile(
        "|".join(re.escape(token.content) for token in added if token.special) or "$^"
    )
