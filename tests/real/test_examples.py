"""docs/examples.md shows what was measured, on rows that are what the page says."""

import copy
import json

import pytest
from conftest import ROOT


@pytest.fixture
def gallery(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools/gallery")
    import page
    import rows

    return page, rows


def test_page_and_pictures_are_written_of_the_figures(gallery):
    page, _ = gallery
    figures = json.loads(page.FIGURES.read_text("utf8"))
    text = page.PAGE.read_text("utf8")
    assert page.filled(text, figures) == text
    for name, found in figures.items():
        assert page.section(name, found) in text
        picture = (ROOT / f"docs/examples/{name}.svg").read_text("utf8")
        assert page.picture(name, found["figures"]) == picture
        for ours, plain in found.get("compared", {}).values():
            assert ours == pytest.approx(plain, abs=1e-3)


def test_rows_are_made_by_the_rules_that_the_page_names(gallery, tmp_path):
    _, rows = gallery
    for name, make in rows.ROWS.items():
        made = make()
        assert made == make() and len(made) > rows.HELD_OUT
        held_out = rows.write(made, tmp_path)
        trained = (tmp_path / "train.jsonl").read_text("utf8").splitlines()
        assert len(held_out) == 100 and f" {len(trained)} " in (
            ROOT / f"tools/gallery/{name}.toml"
        ).read_text("utf8")
        assert not {*trained} & {*(tmp_path / "held_out.jsonl").read_text("utf8").splitlines()}
    for pair in made:
        [chosen], [rejected] = pair["chosen"], pair["rejected"]
        assert "?" in chosen["content"] and "?" not in rejected["content"]
        assert len(chosen["content"].split()) == len(rejected["content"].split())
    names = [{*row["right"][0]} for row in rows.calls()]
    assert sum(bool(name & set().union(*names[100:])) for name in names[:100]) == 16


def test_calls_are_judged_by_the_answers_of_bfcl(gallery):
    _, rows = gallery
    for row in rows.calls():
        call = row["messages"][-1]["tool_calls"][0]["function"]
        [right] = row["right"]
        assert rows.exact(call, right)
        assert not rows.exact({**call, "name": "other"}, right)
        for name in call["arguments"]:
            wrong = copy.deepcopy(call)
            wrong["arguments"][name] = "something else"
            assert not rows.exact(wrong, right)
        assert not rows.exact({**call, "arguments": call["arguments"] | {"more": 1}}, right)
