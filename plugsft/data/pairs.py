"""Render preferences: each row as two texts with the same prompt, chosen first."""

from json import dumps
from typing import Any

from ..base.errors import DataError
from ..base.types import Rendered, Row
from ..recipe.tables import Data
from ..tokens.schema import WEIGHT
from ..tokens.tokenizer import Tokenizer
from .formats import BadRow, read_weight, value_of
from .render import READERS, lead_row, render_as
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
    answers: list[Row] = []
    pair_rows: list[int] = []
    bad: dict[int, str] = {}
    weights = [1.0] * len(rows)
    for number, row in enumerate(rows):
        try:
            pair = row | {ours: row.get(yours) for ours, yours in data.columns.items()}
            weights[number] = read_weight(pair)
            answers += split_pair(pair)
            pair_rows.append(number)
        except BadRow as error:
            bad[number] = str(error)
    if not first.keys() >= {*ANSWERS}:
        why = next(iter(bad.values()), "the first rows lack them")
        raise DataError(
            f"no row has two answers to compare: {why}. Pairs have columns "
            "chosen and rejected, with a prompt or a common beginning; name yours in "
            '[data.columns], for instance chosen = "good"; single answers with a label are for '
            + READERS["label"]
        )
    weighted = any(data.columns.get(WEIGHT, WEIGHT) in row for row in rows)
    if not pair_rows:
        return Rendered(bad=bad)
    texts = isinstance(first["chosen"], str) and not isinstance(first.get("prompt"), list)
    kind = "completion" if texts else "chat completion"
    rendered = render_as(kind, answers, tokenizer, data)
    for answer, reason in rendered.bad.items():
        bad[pair_rows[answer // 2]] = f"{ANSWERS[answer % 2]}: {reason}"
    for answer, turn in zip(rendered.rows, rendered.turns, strict=True):
        if turn:
            bad[pair_rows[answer // 2]] = f"{ANSWERS[answer % 2]}: {SEVERAL}"
    complete = [n for n, answer in enumerate(rendered.rows) if pair_rows[answer // 2] not in bad]
    return Rendered(
        texts=[rendered.texts[n] for n in complete],
        spans=[rendered.spans[n] for n in complete],
        rows=[pair_rows[rendered.rows[n] // 2] for n in complete],
        bad=bad,
        special_tokens=rendered.special_tokens,
        mask=f"of two answers: {rendered.mask}",
        warnings={
            warning: [pair_rows[answer // 2] for answer in numbers]
            for warning, numbers in rendered.warnings.items()
        },
        read={*ANSWERS, "prompt", "system", *SHARED, WEIGHT},
        columns={WEIGHT: weights} if weighted else {},
    )


def split_pair(row: Row) -> list[Row]:
    """Return a row as two rows with prompt and completion; raise BadRow if it is not a pair."""
    for name in ANSWERS:
        value_of(row, name)
    prompt: Any = row.get("prompt")
    answers: list[Any] = [[row[a]] if isinstance(row[a], dict) else row[a] for a in ANSWERS]
    types = {type(answer) for answer in answers}
    if answers[0] == answers[1]:
        raise BadRow("chosen and rejected are the same")
    if types == {str}:
        if isinstance(prompt, list):
            answers = [[{"role": "assistant", "content": answer}] for answer in answers]
    elif types == {list}:
        if isinstance(prompt, str) and all(map(_begins_with_answer, answers)):
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
    if row.get("system"):
        if isinstance(prompt, str):
            raise BadRow("'system' is for chats, and the answers are texts")
        prompt = [{"role": "system", "content": row["system"]}, *prompt]
    shared = {name: row[name] for name in SHARED if row.get(name) is not None}
    return [{"prompt": prompt, "completion": answer, **shared} for answer in answers]


def _begins_with_answer(turns: list[Any]) -> bool:
    """Return whether a conversation begins with the assistant."""
    first = turns[0] if turns else None
    return isinstance(first, dict) and (first.get("role") or first.get("from")) in (
        "assistant",
        "gpt",
    )
