"""Published tokenizers and real chats."""

import pytest
from downloads import TOKENIZERS, real_chats, unpack_tokenizer
from transformers import AutoTokenizer


@pytest.mark.parametrize("name", TOKENIZERS)
def test_real_tokenizer_returns_the_text_of_real_chats(name, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(unpack_tokenizer(name, tmp_path))
    texts = [row["messages"][-1]["content"] for row in real_chats()[:50]]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
