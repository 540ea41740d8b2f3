"""Render preferences: each row as two texts with the same prompt, chosen first."""

from json import dumps
from typing import Any

from ..base.errors import DataError
from ..base.types import Rendered, Row
from ..recipe.tables import Data, short
from ..tokens.schema import WEIGHT
from ..tokens.tokenizer import Tokenizer
from .formats import BadRow, first_role, read_optional, require
from .render import READERS, lead_row, read_rows, renamed, render_format
from .turns import common_prefix

ANSWERS = ("chosen", "rejected")
SEVERAL = (
    "the chat template rewrites its earlier turns, so they cannot be one sequence; put all turns "
    "but the last into the prompt"
)
SHARED = ("tools", "chat_template_kwargs")
"""Columns that belong to both conversations of a row."""


def render_pairs(rows: list[Row], tokenizer: Tokenizer, data: Data) -> Rendered:
    """Render the chosen and the rejected answer of each row, both with the prompt."""
    first = lead_row(rows, data)
    result = Rendered(read={*ANSWERS, "prompt", "system", *SHARED, WEIGHT})
    named = [renamed(row, data) for row in rows]
    answers: list[Row] = []
    pair_rows: list[int] = []
    for number, pair in read_rows(named, split_pair, result):
        answers += pair
        pair_rows.append(number)
    if not first.keys() >= {*ANSWERS}:
        why = next(iter(result.bad.values()), "the first rows lack them")
        raise DataError(
            f"no row has two answers to compare: {why}. Pairs have columns "
            "chosen and rejected, with a prompt or a common beginning; name yours in "
            '[data.columns], for instance chosen = "good"; single answers with a label are for '
            + READERS["label"]
        )
    texts = isinstance(first["chosen"], str) and not isinstance(first.get("prompt"), list)
    kind = "completion" if texts else "chat completion"
    rendered = render_format(kind, answers, tokenizer, data)
    result.special_tokens = rendered.special_tokens
    result.mask = f"of two answers: {rendered.mask}"
    for answer, reason in rendered.bad.items():
        result.bad[pair_rows[answer // 2]] = f"{ANSWERS[answer % 2]}: {reason}"
    for answer, turn in zip(rendered.rows, rendered.turns, strict=True):
        if turn:
            result.bad[pair_rows[answer // 2]] = f"{ANSWERS[answer % 2]}: {SEVERAL}"
    for text, answer in enumerate(rendered.rows):
        row = pair_rows[answer // 2]
        if row not in result.bad:
            result.texts.append(rendered.texts[text])
            result.spans.append(rendered.spans[text])
            result.rows.append(row)
    for warning, numbers in rendered.warnings.items():
        result.warnings[warning] = [pair_rows[answer // 2] for answer in numbers]
    return result


def split_pair(row: Row) -> list[Row]:
    """Make two rows with prompt and completion of a pair; raise BadRow if a row is none."""
    for name in ANSWERS:
        require(row, name)
    prompt: Any = row.get("prompt")
    if "prompt" in row and isinstance(row["chosen"], str):
        require(row, "prompt")  # only a chat may hold its prompt itself
    if not isinstance(prompt, str | list | None):
        raise BadRow(f"'prompt' is {short(prompt)}, and should be a text or a list of turns")
    answers: list[Any] = [[row[a]] if isinstance(row[a], dict) else row[a] for a in ANSWERS]
    types = {type(answer) for answer in answers}
    if answers[0] == answers[1]:
        raise BadRow("chosen and rejected are the same")
    if types == {str}:
        if isinstance(prompt, list):
            answers = [[{"role": "assistant", "content": answer}] for answer in answers]
    elif types == {list}:
        if isinstance(prompt, str) and {*map(first_role, answers)} == {"assistant"}:
            prompt = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, str) and dumps(prompt.strip())[1:-1] not in dumps(answers[0]):
            raise BadRow("the text of 'prompt' is in no turn of 'chosen'")
    else:
        raise BadRow("chosen and rejected are not both texts, or both lists of turns")
    if type(prompt) is not type(answers[0]):
        # No answer is empty.
        size = min(common_prefix(*answers), len(answers[0]) - 1, len(answers[1]) - 1)
        prompt = answers[0][:size]
        if not prompt:
            raise BadRow("no prompt, and chosen and rejected have no common beginning")
        # As in TRL: most tokenizers write the space before a word and the word as one token.
        prompt = prompt[:-1] if prompt[-1] == " " else prompt
        answers = [answer[len(prompt) :] for answer in answers]
    elif isinstance(prompt, list) and all(answer[: len(prompt)] == prompt for answer in answers):
        answers = [answer[len(prompt) :] for answer in answers]
    if system := read_optional(row, "system"):
        if isinstance(prompt, str):
            raise BadRow("'system' is for chats, and the answers are texts")
        prompt = [{"role": "system", "content": system}, *prompt]
    shared = {name: row[name] for name in SHARED if row.get(name) is not None}
    return [{"prompt": prompt, "completion": answer, **shared} for answer in answers]
