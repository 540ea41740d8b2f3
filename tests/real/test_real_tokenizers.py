"""Published tokenizers and real chats."""

from functools import cache

import pytest
from conftest import only_full
from downloads import TOKENIZERS, real_chats, smollm2, unpack_tokenizer
from transformers import AutoTokenizer

from plugsft.data_kit import Tokenizer
from plugsft.plugins.fast_tokenizer import OWN, FastTokenizer


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """Return a function that reads a published tokenizer, once."""

    @cache
    def read(name):
        folder = smollm2() if name == "smollm2" else None
        return AutoTokenizer.from_pretrained(
            folder or unpack_tokenizer(name, tmp_path_factory.mktemp(name))
        )

    return read


def texts():
    """Return the chats' texts, with line breaks and runs of spaces between the turns."""
    chats = real_chats()[:200]
    return ["\n\n   ".join(turn["content"] for turn in chat["messages"]) for chat in chats]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_real_tokenizer_returns_the_text_of_real_chats(published, name):
    for row in real_chats()[:50]:
        text = row["messages"][-1]["content"]
        ids = published(name)(text, add_special_tokens=False)["input_ids"]
        assert published(name).decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("engine", ["auto", pytest.param("fastokens", marks=only_full)])
@pytest.mark.parametrize("name", ["smollm2", *TOKENIZERS])
def test_fast_engine_gives_the_ids_of_transformers_on_real_chats(published, name, engine):
    expected = published(name)(texts(), add_special_tokens=False)["input_ids"]
    plugin = FastTokenizer(engine=engine)
    plugin.check()
    encoded = plugin.encode(texts(), Tokenizer(published(name).backend_tokenizer), False)
    assert encoded.ids.tolist() == [token for ids in expected for token in ids]
    assert encoded.counts.tolist() == [*map(len, expected)]
    assert encoded.engines[OWN] < len(expected) / 2, plugin.reasons
