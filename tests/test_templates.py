"""Rows as text: what is trained on, as transformers and trl would have it."""

from pathlib import Path

import pytest
import trl
from conftest import chats
from hypothesis import given, settings
from hypothesis import strategies as st

from plugsft import DataError
from plugsft.jinja import MARKED
from plugsft.jsonl import Held
from plugsft.pretrained import train_tokenizer
from plugsft.recipe import Data
from plugsft.templates import CHATML, Chat, render, training_template
from plugsft.tokenizer import encode, lighten
from plugsft.work import mask_of

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
PAIRS = sorted(
    path.name.removesuffix("_training.jinja") for path in TEMPLATES.glob("*_training.jinja")
)
ASK, TELL = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "owls"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.fixture(scope="module")
def tokenizer():
    def texts(batch, source, wrapped):
        return render(batch, wrapped, Data(source="none"))

    return train_tokenizer([Held(chats(40))], texts, 500)


@pytest.fixture
def with_template(tokenizer):
    """Give the tokenizer another template for a test."""

    def change(template, **names):
        tokenizer.chat_template = template
        for name, value in names.items():
            setattr(tokenizer, name, value)
        return tokenizer

    yield change
    tokenizer.chat_template, tokenizer.eos_token = CHATML.read_text(), "<|im_end|>"
    tokenizer.bos_token = None


def rendered(tokenizer, *rows, **data):
    return render(list(rows), lighten(tokenizer), Data(source="none", **data))


def trained(tokenizer, row, **data):
    """The text of one row, and the parts of it that are trained on."""
    result = rendered(tokenizer, row, **data)
    assert not result.bad
    (text,), (spans,) = result.texts, result.spans
    return text, [text[start:stop] for start, stop in spans]


def test_chats_train_what_the_assistant_says(tokenizer):
    text, parts = trained(tokenizer, {"messages": [SYSTEM, ASK, TELL, ASK, TELL]})
    assert parts == ["owls<|im_end|>"] * 2
    assert text.count("who?") == 2 and text.startswith("<|im_start|>system\nbe brief<|im_end|>\n")
    assert trained(tokenizer, {"messages": [ASK, TELL] * 2}, train_on="last")[1] == [
        "owls<|im_end|>"
    ]
    text, parts = trained(tokenizer, {"messages": [ASK, TELL]}, train_on="all")
    assert parts == [text]


def test_prompts_and_completions(tokenizer):
    row = {"prompt": "2 + 2 = ", "completion": "4"}
    assert trained(tokenizer, row) == ("2 + 2 = 4<|im_end|>", ["4<|im_end|>"])
    assert trained(tokenizer, row, train_on="all")[1] == ["2 + 2 = 4<|im_end|>"]
    assert trained(tokenizer, {**row, "completion": "4<|im_end|>"})[0] == "2 + 2 = 4<|im_end|>"
    assert trained(tokenizer, {**row, "prompt": ""})[0] == "4<|im_end|>"
    assert rendered(tokenizer, row).special_tokens is True
    chat = {"prompt": [ASK, TELL, ASK], "completion": [TELL]}
    assert trained(tokenizer, chat)[1] == ["owls<|im_end|>"], "the prompt's answers are not"
    assert rendered(tokenizer, chat).special_tokens is False


def test_text(tokenizer):
    assert trained(tokenizer, {"text": "owls"}) == ("owls<|im_end|>", ["owls<|im_end|>"])


def test_columns_by_other_names(tokenizer):
    row = {"conversation": [ASK, TELL], "text": "not this"}
    assert trained(tokenizer, row, columns={"messages": "conversation"})[1] == ["owls<|im_end|>"]
    assert rendered(tokenizer, {"zzz": 1}) is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "no 'messages'"),
        ({"messages": []}, "'messages' is no list of turns, or an empty one"),
        ({"messages": "hi"}, "'messages' is no list of turns, or an empty one"),
        ({"messages": ["hi"]}, "a turn has no role"),
        ({"messages": [{"content": "hi"}]}, "a turn has no role"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "unknown role 'wizard'"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown role ['user']"),
        (
            {"messages": [ASK, {"role": "assistant", "content": ""}]},
            "an empty turn of the assistant",
        ),
        ({"messages": [{"role": "user"}, TELL]}, "an empty turn of the user"),
        ({"messages": [{"role": "user", "content": 3}, TELL]}, "a turn of the user is no text"),
        ({"messages": [ASK]}, "no trained token"),
        ({"messages": [ASK, {**TELL, "content": "\ud83e"}]}, "half a character"),
        ({"prompt": "a", "completion": None}, "no 'completion'"),
        ({"prompt": None, "completion": "b"}, "no 'prompt'"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"prompt": 3, "completion": "b"}, "'prompt' is no text"),
        ({"prompt": "a", "completion": [TELL]}, "'prompt' is no list of turns"),
        ({"text": ""}, "'text' is empty"),
        ({"text": ["a"]}, "'text' is no text"),
        ({"text": "\ud83e"}, "half a character"),
    ],
)
def test_a_bad_row_is_told_apart_from_its_good_neighbours(tokenizer, row, reason):
    good = {
        "messages": {"messages": [ASK, TELL]},
        "prompt": {"prompt": "a", "completion": "b"},
        "text": {"text": "a"},
    }[next(iter(row))]
    if isinstance(row.get("completion"), list):
        good = {"prompt": [ASK], "completion": [TELL]}
    result = rendered(tokenizer, good, row, good)
    assert list(result.bad) == [1] and result.bad[1].startswith(reason)
    assert result.rows == [0, 2] and len(result.texts) == len(result.spans) == 2


def test_a_template_that_refuses_a_row_is_quoted_in_one_line(with_template):
    refuses = "{{ raise_exception('roles must\nalternate') }}{% generation %}{% endgeneration %}"
    result = rendered(with_template(refuses), {"messages": [ASK, TELL]})
    assert result.bad == {0: "the chat template refuses it: roles must alternate"}
    for broken in (
        "{{ 1 / 0 }}",
        "{{ messages[0]['x']['y'] }}",
        "{{ messages.nothing() }}",
        "{% if",
    ):
        tokenizer = with_template(broken + "{% generation %}{% endgeneration %}")
        assert (
            "the chat template refuses it: "
            in rendered(tokenizer, {"messages": [ASK, TELL]}).bad[0]
        )


def test_a_tokenizer_without_a_template_is_refused_with_the_cure(with_template):
    for nothing in (None, ""):
        with pytest.raises(DataError, match=r"has no chat template. Set model.chat_template = "):
            rendered(with_template(nothing), {"messages": [ASK, TELL]})
    assert rendered(with_template(None), {"text": "needs none"}).texts


def test_a_template_without_marks_is_refused_with_the_cure(with_template):
    bare = with_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match=r"put \{% generation %\} and \{% endgeneration %\} around"):
        rendered(bare, {"messages": [ASK, TELL]})
    assert trained(bare, {"messages": [ASK, TELL]}, train_on="all")[1] == ["who?owls"]


def test_template_variables(with_template):
    template = (
        "{{ name }}{{ eos_token }}{% generation %}{{ messages[1].content }}{% endgeneration %}"
    )
    row = {"messages": [ASK, TELL]}
    assert trained(with_template(template), row, template_kwargs={"name": "N"}) == (
        "N<|im_end|>owls",
        ["owls"],
    )


def test_a_template_among_several_is_the_default(with_template):
    named = {"default": CHATML.read_text(), "tools": "{{ nothing }}"}
    assert trained(with_template(named), {"messages": [ASK, TELL]})[1] == ["owls<|im_end|>"]


CONTENT = st.text(min_size=1, max_size=30).filter(str.strip)
CHATS = st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(CHATS)
def test_the_mask_is_transformers_mask(tokenizer, turns):
    messages = [
        {"role": role, "content": content}
        for pair in turns
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    result = rendered(tokenizer, {"messages": messages})
    encoded = encode(result.texts, lighten(tokenizer), result.special_tokens)
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.ids.tolist() == theirs["input_ids"]
    assert (
        mask_of(encoded, result.texts, result.spans).astype(int).tolist()
        == theirs["assistant_masks"]
    )


def test_a_first_token_has_no_predecessor_that_could_predict_it(tokenizer):
    result = rendered(tokenizer, {"text": "owls"})
    encoded = encode(result.texts, lighten(tokenizer), False)
    mask = mask_of(encoded, result.texts, result.spans)
    assert not mask[0] and mask[1:].all()


def test_a_last_character_of_several_tokens_is_trained_whole(tokenizer):
    text = "owls 🦉 hoot"
    encoded = encode([text], lighten(tokenizer), False)
    mask = mask_of(encoded, [text], [[(0, text.index("🦉") + 1)]])
    assert tokenizer.decode(encoded.ids[: mask.sum() + 1]) == "owls 🦉"


def test_an_empty_span_takes_nothing_away(tokenizer):
    encoded = encode(["owls and foxes"], lighten(tokenizer), False)
    whole = mask_of(encoded, ["owls and foxes"], [[(0, 14)]])
    assert not mask_of(encoded, ["owls and foxes"], [[(6, 6)]]).any()
    for place in range(15):
        assert (mask_of(encoded, ["owls and foxes"], [[(0, 14), (place, place)]]) == whole).all()


@pytest.mark.parametrize("name", PAIRS)
def test_trl_s_training_templates_are_found(name):
    plain = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf8")
    training = training_template(plain)
    assert training == (TEMPLATES / f"{name}_training.jinja").read_text(encoding="utf8")
    assert MARKED.search(training)
    assert training_template(plain + " ") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.filterwarnings("ignore")  # trl's own
def test_trl_would_choose_the_same(with_template, name):
    plain = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf8")
    tokenizer = with_template(plain)
    ours = plain if MARKED.search(plain) else training_template(plain)
    try:
        theirs = trl.chat_template_utils.get_training_chat_template(tokenizer)
    except Exception as error:  # some templates need another tokenizer or a processor
        pytest.skip(f"trl cannot say: {error}")
    if theirs is not None:
        assert theirs == ours


@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "qwen3", "gemma", "phi3"])
def test_chats_through_trl_s_templates(with_template, name):
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf8")
    tokenizer = with_template(template, bos_token="<|im_start|>")
    chat = Chat(lighten(tokenizer), Data(source="none"))
    assert chat.describe() == "trl's training variant of the chat template"
    row = {"messages": [ASK, TELL, ASK, TELL]}
    text, parts = trained(tokenizer, row)
    same = text == tokenizer.apply_chat_template(row["messages"], tokenize=False)
    # Qwen3's own drops the thoughts of earlier turns; trl's keeps them, and the record says so.
    assert same == (name != "qwen3")
    assert ("otherwise" in rendered(tokenizer, row).mask) != same
    assert trained(tokenizer, row, train_on="last")[1] == parts[-1:]
    assert len(parts) == 2 and all("owls" in part and "who?" not in part for part in parts)
