"""Check my_plugin in real runs on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from plugsft import testing

ROWS = [
    {"question": f"What is {a} + {b}?", "choices": [str(a), str(a + b), str(b)], "answer": 1}
    for a in range(1, 5)
    for b in range(5, 11)
]


def tables(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write rows to a file; return the tables that train on it."""
    file = folder / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return {"data": {"source": str(file)}}


def test_it_writes_the_same_tokens_in_a_worker_process(tmp_path: Path) -> None:
    testing.survives_a_worker("my_plugin", tables=tables(tmp_path, ROWS))


def test_it_trains(tmp_path: Path) -> None:
    testing.summary("my_plugin", {"letters": "123"}, tables=tables(tmp_path, ROWS))


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    bad = tables(tmp_path, [*ROWS, {**ROWS[0], "answer": 3}])
    with pytest.raises(AssertionError, match="'answer' is no number of one of"):
        testing.summary("my_plugin", tables=bad)
