"""Chats of one shape share an outline, and are rendered as they would be alone."""

import random

import pytest
from served import TEMPLATES, answer, chat_of, conversation

from plugsft.data.chat import Chat
from plugsft.data.formats import BadRow
from plugsft.recipe.tables import Data

WORDS = ("hello there", "z", "Yes, I do.")
# Words that templates or Python's formats may look into.
NASTY = (
    *("{0} and {{1}}", "\u20451\u2046", "</think>", "<think>\nhm\n</think>\n\nyes", "<|im_end|>"),
    *("<tool_response>ok</tool_response>", "<tool_response>", " before", "after \n", "\n\nboth\n"),
    *("user", "system", "the content of the role", "'quoted'", "a. b.", "x\ny", "<h1>&amp;</h1>"),
    *(
        "[INST] x [/INST]",
        "\u4f60\u597d",
        "/think",
        '{"a": 1}',
        "a" * 2000,
        "True",
        "\\n",
        "0",
        " \t ",
    ),
)


def ask(words):
    return {"role": "user", "content": words}


def outcome(examples, turns):
    try:
        return examples(conversation(turns))
    except BadRow as error:
        return str(error)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_chats_that_fill_outlines_are_those_rendered_alone(name):
    chat, choose = chat_of(TEMPLATES[name]), random.Random(name)
    for number in range(60):
        words = WORDS if number % 2 else WORDS + NASTY
        turns = [{"role": "system", "content": choose.choice(words)}] * (number % 5 == 0)
        for _ in range(choose.randint(1, 3)):
            turns += [ask(choose.choice(words)), answer(choose.choice(words))]
        assert outcome(chat.examples, turns) == outcome(chat.examples_by_turn, turns), turns
    refused = isinstance(outcome(chat.examples, [ask("a"), answer("b")]), str)
    assert chat.outlines.filled >= 15 or refused


def test_later_chats_of_a_shape_are_rendered_once(monkeypatch):
    chat, written = chat_of(TEMPLATES["qwen3"]), []
    own = chat._write
    monkeypatch.setattr(chat, "_write", lambda *args: written.append(1) or own(*args))
    counts = []
    for number in range(1, 9):
        written.clear()
        chat.examples(conversation([ask("who?"), answer(f"owl {number}")] * 8))
        counts.append(len(written))
    assert counts[0] > 16 and [counts[n - 1] for n in (3, 5, 6, 7)] == [1] * 4, counts
    assert counts[7] > 16, "the chat whose number is a power of two is compared"


def test_the_next_slice_of_rows_has_the_outlines_of_the_last():
    chat = chat_of(TEMPLATES["qwen3"], day="2026-11-25")
    again = Chat(chat.tokenizer, Data(source="x"))
    assert again.outlines is chat.outlines and len(chat.tokenizer.kept) == 1
    assert Chat(chat.tokenizer, Data(source="x", train_on="last")).outlines is not chat.outlines


def test_a_template_that_looks_into_words_unseen_is_found():
    source = "{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ '</s>' }}{% endfor %}"
    source += "{% if add_generation_prompt %}assistant:"
    source += "{{ '</s>' if messages[0].content|length > 8 }}{% endif %}"
    chat = chat_of(source)
    for _ in range(3):
        chat.examples(conversation([ask("a"), answer("b")]))
    with pytest.raises(AssertionError, match="please report it, with the template"):
        chat.examples(conversation([ask("a long question"), answer("b")]))
