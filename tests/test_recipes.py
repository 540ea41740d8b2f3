"""Every key of our recipes is understood."""

import pytest
from conftest import ROOT
from transformers.utils.chat_template_utils import render_jinja_template

from plugsft.registry.load import load


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_a_shipped_recipe_is_valid_and_explained(path):
    recipe, active = load(path)
    assert {*active.plugins} == {*recipe.plugins}
    text = path.read_text(encoding="utf8")
    assert text.startswith("# ") and text.count("#") >= 6


def test_the_chat_format_of_tulu():
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo"), ("user", "?")]
    chat = [{"role": role, "content": content} for role, content in [*turns, ("assistant", "!")]]
    template = (ROOT / "recipes/tulu.jinja").read_text(encoding="utf8")
    texts, spans = render_jinja_template(
        [chat], chat_template=template, return_assistant_tokens_mask=True, eos_token="</s>"
    )
    first = "<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\nYo</s>\n"
    assert texts == [first + "<|user|>\n?\n<|assistant|>\n!</s>"]
    assert [texts[0][start:stop] for start, stop in spans[0]] == ["Yo</s>", "!</s>"]
    asked, _ = render_jinja_template(
        [chat[1:2]], chat_template=template, add_generation_prompt=True, eos_token="</s>"
    )
    assert asked == ["<|user|>\nHi\n<|assistant|>\n"]
