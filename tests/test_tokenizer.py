"""Tokenizers as users have them: without pad, end or template, with odd settings."""

import json

import numpy as np
import pytest
from conftest import TEXT, chats
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from plugsft import RecipeError
from plugsft.data.chat import CHATML
from plugsft.data.jsonl import RowList
from plugsft.data.load_tokenizer import SPECIAL, load_tokenizer, train_tokenizer
from plugsft.data.render import render_rows as render
from plugsft.recipe.tables import Data, Model
from plugsft.tokens.ends import pad_id
from plugsft.tokens.tokenizer import lighten


def make(rows=None, vocab=500):
    data = Data(source="none")
    return train_tokenizer(
        [RowList(chats(40) if rows is None else rows)],
        lambda batch, source, tokenizer: render(batch, tokenizer, data),
        vocab,
    )


@pytest.fixture(scope="module")
def tokenizer():
    return make()


def save(tokenizer, folder, **changes):
    """Save a tokenizer, with changes to its tokenizer.json."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return Model(path=str(folder))


def test_a_new_tokenizer_knows_any_text(tokenizer):
    assert len(tokenizer) <= 500 and tokenizer.eos_token == "<|im_end|>"
    for text in (TEXT, "\0\t\r\n", "🦉👩‍👩‍👧", "नमस्ते", "  two  "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    )


def test_training_is_the_same_every_time(tokenizer):
    assert make().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert make(vocab=300).backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str()


def test_training_passes_over_what_is_no_row(tokenizer):
    rows = [None, {"messages": []}, *chats(40), {"messages": [{"role": "nobody"}]}]
    assert make(rows).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_markers_in_the_data_are_not_learned_as_letters():
    rows = [{"text": "<|im_start|><|im_end|>" * 50 + "aaaa bbbb"}]
    learned = [word for word in make(rows).get_vocab() if len(word) > 1 and word not in SPECIAL]
    assert learned and set("".join(learned)) == {"a", "b", "Ġ"}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=40), max_size=5), st.booleans())
def test_encoding_is_the_tokenizer_s_own(tokenizer, texts, special):
    encoded = lighten(tokenizer).encode_texts(texts, special)
    own = [tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]
    assert len(encoded.counts) == len(own)
    parts = np.split(encoded.ids, np.cumsum(encoded.counts)[:-1]) if texts else []
    assert [part.tolist() for part in parts] == own
    assert (np.diff(encoded.ends) >= 0).all()
    sizes = [len(text.encode()) for text in texts]
    for count, end in zip(np.cumsum(encoded.counts), np.cumsum(sizes), strict=True):
        assert not count or encoded.ends[count - 1] == end


def test_tokens_added_at_both_ends_have_a_place(tokenizer, tmp_path):
    model = save(tokenizer, tmp_path)
    loaded = load_tokenizer(model, tmp_path)
    both = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    loaded.backend_tokenizer.post_processor = both
    encoded = lighten(loaded).encode_texts(["owls"], True)
    assert encoded.ids[0] == 1 and encoded.ids[-1] == 2
    assert encoded.ends[0] == 0 and encoded.ends[-1] == 4
    assert lighten(loaded).encode_texts(["owls"], False).ids.tolist() == encoded.ids[1:-1].tolist()


def test_a_file_that_truncates_and_pads_is_not_obeyed(tokenizer, tmp_path):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    model = save(tokenizer, tmp_path, truncation=truncation, padding=padding)
    encoded = lighten(load_tokenizer(model, tmp_path)).encode_texts([TEXT, "a"], False)
    assert encoded.ids.tolist() == tokenizer(TEXT)["input_ids"] + tokenizer("a")["input_ids"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"pad_token": "<|pad|>", "eos_token": "<|im_end|>"}, 0),
        ({"eos_token": "<|im_end|>"}, 2),
        ({"pad_token": "<|im_end|>", "eos_token": "<|im_end|>"}, 2),
        ({}, 0),
    ],
)
def test_something_fills_a_row(tokenizer, tmp_path, names, expected):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **names)
    loaded = load_tokenizer(save(bare, tmp_path), tmp_path)
    assert pad_id(loaded) == expected
    text = render([{"text": "owls"}], lighten(loaded), Data(source="none")).texts[0]
    assert text == "owls" + names.get("eos_token", "")


def test_a_template_of_the_recipe_s_own(tokenizer, tmp_path):
    model = save(tokenizer, tmp_path)
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages }}")
    with_own = model.model_copy(update={"chat_template": str(own)})
    assert load_tokenizer(with_own, tmp_path).chat_template == "{{ messages }}"
    assert load_tokenizer(model, tmp_path).chat_template == CHATML.read_text()
    for place, content in [
        (tmp_path / "none", None),
        (tmp_path / "bytes", b"\xff"),
        (tmp_path, None),
    ]:
        if content:
            place.write_bytes(content)
        wrong = model.model_copy(update={"chat_template": str(place)})
        with pytest.raises(RecipeError, match=r"model.chat_template: '.*' cannot be read"):
            load_tokenizer(wrong, tmp_path)


def test_what_is_no_tokenizer(tmp_path):
    for table, key in [
        ({"path": str(tmp_path / "nowhere")}, "model.path"),
        ({"path": "x/y", "tokenizer": str(tmp_path)}, "model.tokenizer"),
    ]:
        with pytest.raises(RecipeError, match=f"{key}: no tokenizer could be loaded") as caught:
            load_tokenizer(Model(**table), tmp_path)
        assert "\n" not in str(caught.value)


def test_a_tokenizer_beside_the_model_s(tokenizer, tmp_path):
    save(tokenizer, tmp_path / "other")
    model = Model(path=str(tmp_path / "nowhere"), tokenizer=str(tmp_path / "other"))
    assert load_tokenizer(model, tmp_path).get_vocab() == tokenizer.get_vocab()


def test_a_tokenizer_of_another_kind(tmp_path):
    """Metaspace and a byte fallback, as Llama's and Gemma's have."""
    kind = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    kind.pre_tokenizer = pre_tokenizers.Metaspace()
    kind.decoder = decoders.Metaspace()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kind.train_from_iterator(
        [TEXT], trainers.BpeTrainer(special_tokens=tokens, show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=kind, eos_token="</s>").save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    encoded = lighten(loaded).encode_texts(["fox 🦉 owls"], False)
    assert encoded.ids.tolist() == loaded("fox 🦉 owls")["input_ids"]
    assert encoded.ends[-1] == 13 and (np.diff(encoded.ends) >= 0).all()
    text = "the quick fox"
    encoded = lighten(loaded).encode_texts([text], False)
    offsets = loaded.backend_tokenizer.encode(text).offsets
    assert encoded.ends.tolist() == [end for _, end in offsets], "the space before it is no byte"
