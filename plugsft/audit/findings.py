"""Findings about rows, which `check` and `inspect` share, and the lines of `plugsft check`."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from rich.text import Text

from ..base.console import out
from ..base.errors import PlugsftError
from ..base.types import Rows
from ..data.chat import Chat
from ..data.formats import TEXTS, BadRow, format_of, read_chat
from ..data.render import renamed
from ..data.row_names import CURE_LONG, cure_bad, describe_warnings, name_rows
from ..data.sample import Sample
from ..data.slices import ShardWriter
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


def judge_rows(sample: Sample, rows: Rows, data: Data, over: int) -> tuple[list[str], list[str]]:
    """Name the rows that stop the run, then those that are dropped, cut or unusual.

    `over` is the number of tokens beyond data.max_length.
    """
    shard, errors, bad = sample.shard, list[str](), list[str]()
    warnings = describe_warnings(shard.warnings, rows)
    for reason, numbers in sorted(shard.bad.items(), key=lambda item: item[1]):
        text = f"{name_rows(numbers, rows)}: {reason}"
        bad.append(text)
        if data.on_bad_row == "error":
            errors.append(text + cure_bad({reason: numbers}))
        else:
            warnings.append(f"{text}; dropped")
    for numbers, fate in (
        (shard.too_long, "dropped"),
        (shard.truncated, f"cut by {over:,} tokens"),
    ):
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


def judge_chats(sample: Sample, work: ShardWriter, opened: OpenSource, active: Active) -> list[str]:
    """Warn of words that a template leaves out, and of special tokens among them."""
    kind = format_of(read_lead_row(opened, work.data))
    if kind is None or kind in TEXTS or active.having("render"):
        return []
    rows, special = opened.part(0, len(opened)), special_tokens(work)
    chat = Chat(work.tokenizer, work.data)
    found: dict[str, list[int]] = defaultdict(list)
    read = ((numbers, opened.read(numbers.start, numbers.stop)) for numbers in sample.ranges)
    for number, row in chain.from_iterable(zip(*pair, strict=True) for pair in read):
        if not isinstance(row, dict):
            continue
        named = renamed(row, work.data)
        try:
            conversation = read_chat(kind, named)
            text = "\n".join(text for text, _ in chat.render(conversation).texts)
        except BadRow:
            continue
        for message in conversation.messages:
            content = message["content"]
            if content.strip() not in text:
                found[f"the chat template drops words of the {message['role']}"].append(number)
            for token in special.findall(content):
                reads = f"the text contains '{token}', which the model reads as a control token"
                found[reads].append(number)
    return [f"{name_rows(numbers, rows)}: {warning}" for warning, numbers in found.items()]


def special_tokens(work: ShardWriter) -> re.Pattern[str]:
    """Finds the special tokens in a text: a row may spell one by mistake."""
    added = work.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return re.compile(
        "|".join(re.escape(token.content) for token in added if token.special) or "$^"
    )
