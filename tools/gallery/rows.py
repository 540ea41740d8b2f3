"""The rows of the examples, made of real chats and real function calls."""

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/real")]
from downloads import real_calls, real_chats, right_calls  # noqa: E402

Row = dict[str, Any]
HELD_OUT, TRAINED = 100, 520
TURNS = 8
"""Of a chat, the first turns are used."""


def style() -> list[Row]:
    """Chats of eight turns with at most 130 words."""
    chats = [row["messages"][:TURNS] for row in shuffled(real_chats())]
    return [{"messages": chat} for chat in chats if len(chat) == TURNS and words(chat) <= 130]


def calls() -> list[Row]:
    """Questions that one call answers, with their tools, and the calls that BFCL allows."""
    rows = [row | {"right": right} for row, right in zip(real_calls(), right_calls(), strict=True)]
    return shuffled(row for row in rows if len(row["right"]) == 1 and len(json.dumps(row)) <= 1500)


def preferences() -> list[Row]:
    """Chosen: a reply that asks. Rejected: one of another chat, as long, that does not.

    A chat gives one pair at most; the rejected replies are of chats in which no reply asks.
    """
    asking: list[Row] = []
    silent = defaultdict(list)
    for row in shuffled(real_chats()):
        turns = row["messages"][:TURNS]
        at = next((at for at in range(3, len(turns), 2) if asks(turns[at])), None)
        if at is not None:
            asking.append({"prompt": turns[:at], "chosen": [turns[at]]})
        elif not any(map(asks, turns[1::2])):
            for turn in turns[3::2]:
                silent[words([turn])].append(turn)
    pairs = []
    for row in asking:
        length = words(row["chosen"])
        if 4 <= length <= 30 and words(row["prompt"]) <= 80 and silent[length]:
            pairs.append(row | {"rejected": [silent[length].pop()]})
    return pairs


def shuffled(rows: Iterable[Row]) -> list[Row]:
    """The rows in an order that is the same each time."""
    found = [*rows]
    random.Random(0).shuffle(found)
    return found


def words(messages: Iterable[Row]) -> int:
    """How many words some turns have."""
    return sum(len(message["content"].split()) for message in messages)


def asks(turn: Row) -> bool:
    """The rule of the pairs: a question mark."""
    return "?" in turn["content"]


def exact(call: Row, right: dict[str, Any]) -> bool:
    """Whether a call is of the right function, with arguments that BFCL allows."""
    return [call["name"]] == [*right] and fits(call["arguments"], right[call["name"]])


def fits(arguments: Any, allowed: dict[str, list[Any]]) -> bool:
    """Whether each argument has an allowed value, none is unknown, and "" allows those missing."""
    if not isinstance(arguments, dict) or not {*arguments} <= {*allowed}:
        return False
    needed = {name for name, values in allowed.items() if "" not in values}
    return needed <= {*arguments} and all(
        any(equal(value, right) for right in allowed[name]) for name, value in arguments.items()
    )


def equal(value: Any, right: Any) -> bool:
    """Whether a value is the right one; the keys of an object have several right values each."""
    if isinstance(right, dict):
        return fits(value, right)
    if isinstance(right, list) and isinstance(value, list):
        return len(value) == len(right) and all(map(equal, value, right))
    return bool(value == right) and isinstance(value, bool) == isinstance(right, bool)


def write(rows: list[Row], folder: Path, pilot: bool = False) -> list[Row]:
    """Write the training and the held-out rows of an example; return the held-out ones."""
    held_out, trained = (8, 16) if pilot else (HELD_OUT, TRAINED)
    parts = {"train": rows[HELD_OUT : HELD_OUT + trained], "held_out": rows[:held_out]}
    for file, part in parts.items():
        lines = [json.dumps({key: row[key] for key in row if key != "right"}) for row in part]
        (folder / f"{file}.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf8")
    return parts["held_out"]


ROWS = {"style": style, "calls": calls, "preferences": preferences}
