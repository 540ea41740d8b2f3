"""Rows that a wrapper of `render` marks as bad are dropped with their texts, or reported."""

import pytest
from plugin_packages import activate, install
from prepared_rows import prepare_rows

from plugsft import DataError
from plugsft.tokens.store import Tokens

JUDGES = """
    @plugin()
    class Judges:
        "Marks every third row as bad, and gives the rows a column."
        @hookimpl(wrapper=True)
        def render(self, rows):
            rendered = yield
            rendered.columns["number"] = [row["number"] for row in rows]
            rendered.read = {*rendered.read, "number"}
            for place, row in enumerate(rows):
                if row["number"] % 3 == 1:
                    rendered.bad[place] = "too difficult"
            return rendered
"""
ROWS = {
    "texts": [{"text": f"owls see {n} mice", "number": n} for n in range(9)],
    "pairs": [
        {"prompt": "who? ", "chosen": f"owls {n}", "rejected": "elks", "number": n}
        for n in range(9)
    ],
}
PLUGINS = {"texts": {"judges": {}}, "pairs": {"judges": {}, "dpo": {}}}


@pytest.fixture(autouse=True)
def judges(tmp_path, monkeypatch):
    activate(install(tmp_path / "site", judges=JUDGES), monkeypatch)


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_a_plugin_marks_as_bad_are_not_trained(kind, tmp_path):
    tokens = prepare_rows(tmp_path, [ROWS[kind]], PLUGINS[kind], on_bad_row="drop")
    good = [0, 2, 3, 5, 6, 8]
    assert tokens.rows.tolist() == tokens.columns["number"].tolist() == good
    ensure_same_tokens(tokens, tmp_path, kind, good)


def ensure_same_tokens(tokens: Tokens, folder, kind, good):
    """Compare with the tokens of the good rows alone."""
    rows = [ROWS[kind][number] for number in good]
    rows = [each | {"number": 0} for each in rows]
    (folder / "good").mkdir()
    alone = prepare_rows(folder / "good", [rows], PLUGINS[kind])
    for number in range(len(good)):
        for ours, theirs in zip(tokens.example(number), alone.example(number), strict=True):
            assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_a_plugin_marks_as_bad_are_reported(kind, tmp_path):
    with pytest.raises(DataError, match=r"rows-0\.jsonl: lines 2, 5, 8: too difficult"):
        prepare_rows(tmp_path, [ROWS[kind]], PLUGINS[kind])
