"""docs/examples.md shows what was measured, on rows that are what the page says."""

import json

import pytest
from conftest import ROOT


@pytest.fixture(autouse=True)
def gallery(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools/gallery")


def test_page_and_pictures_are_written_of_the_figures():
    import page

    text, figures = page.PAGE.read_text("utf8"), json.loads(page.FIGURES.read_text("utf8"))
    assert page.filled(text, figures) == text
    for name, found in figures.items():
        assert page.section(name, found) in text
        picture = (ROOT / f"docs/examples/{name}.svg").read_text("utf8")
        assert page.picture(name, found["figures"]) == picture
        for ours, plain in found.get("compared", {}).values():
            assert ours == pytest.approx(plain, rel=1e-3)


def test_rows_are_made_by_the_rules_that_the_page_names(tmp_path):
    import rows

    for name, make in rows.ROWS.items():
        rows.write(make(), tmp_path)
        trained, held_out = (
            (tmp_path / f"{part}.jsonl").read_text("utf8").splitlines()
            for part in ("train", "held_out")
        )
        assert len(held_out) == 100 and not {*trained} & {*held_out}
        recipe = (ROOT / f"tools/gallery/{name}.toml").read_text("utf8")
        assert f" {len(trained)} " in recipe
    for pair in rows.preferences():
        [chosen], [rejected] = (
            [turn["content"] for turn in pair[it]] for it in ("chosen", "rejected")
        )
        assert "?" in chosen and "?" not in rejected
        assert len(chosen.split()) == len(rejected.split())
    names = [{*row["right"][0]} for row in rows.calls()]
    assert sum(bool(name & set().union(*names[100:])) for name in names[:100]) == 16


def test_calls_are_judged_by_the_answers_of_bfcl():
    import rows

    for row in rows.calls():
        call, [right] = row["messages"][-1]["tool_calls"][0]["function"], row["right"]
        given = call["arguments"]
        assert rows.exact(call, right) and not rows.exact(call | {"name": "other"}, right)
        for name in [*given, "more"]:
            wrong = call | {"arguments": given | {name: "something else"}}
            assert not rows.exact(wrong, right)
