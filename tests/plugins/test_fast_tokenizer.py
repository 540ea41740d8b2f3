"""fast_tokenizer: the same ids from faster engines, or from the model's own, and the reason."""

import functools
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import TEXT, run_plugsft
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, processors, trainers
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre

from plugsft import PluginError, RecipeError, testing, tokenizer
from plugsft.plugins import fast_tokenizer
from plugsft.plugins.fast_tokenizer import ENGINES, OWN, FastTokenizer, Unfit
from plugsft.tokenizer import encode
from plugsft.work import mask_of

FULL = os.environ.get("PLUGSFT_FULL") == "1"
CORPUS = [
    TEXT,
    TEXT.upper(),
    "we'll they're I'm it's don't 1234567890 3.14 x = [1, 2];\n\n    def f(self):\r\n\treturn {}",
    "Привет мир नमस्ते दुनिया สวัสดี 안녕하세요 こんにちは 世界 🦉👩‍👩‍👧 é ﬁ Å ½",
] * 3
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{CASES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN_2 = LLAMA_3.replace("{1,3}", "")
GPT_4O = "|".join([
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{CASES}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{CASES}?",
    r"\p{N}{1,3}",
    REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),
])  # fmt: skip
BYTES = pre.ByteLevel(add_prefix_space=False)


def split(pattern):
    """Split as a pattern says, and no further."""
    parts = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), parts])


def byte_level(splitter=BYTES, normalizer=None, after=None, added=()):
    """Train a tokenizer whose letters are bytes, as GPT-2's."""
    made = Tokenizer(models.BPE())
    made.normalizer, made.pre_tokenizer = normalizer, splitter
    made.decoder, made.post_processor = decoders.ByteLevel(), after
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    for token in added:
        (made.add_special_tokens if token.special else made.add_tokens)([token])
    return made


def pieces(normalizer=None, splitter=None):
    """Train a tokenizer that spells unknown characters by byte, as sentencepiece makes them."""
    learned = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    learned.pre_tokenizer = pre.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    learned.train_from_iterator(CORPUS[:3], trainer)
    described = json.loads(learned.to_str())
    described["added_tokens"] = [
        one for one in described["added_tokens"] if one["content"] in special
    ]
    made = Tokenizer.from_str(json.dumps(described))
    made.normalizer, made.pre_tokenizer = normalizer, splitter
    return made


def trained(model, trainer, splitter):
    made = Tokenizer(model)
    made.pre_tokenizer = splitter
    made.train_from_iterator(CORPUS, trainer(special_tokens=["<unk>"], show_progress=False))
    return made


ADDED = [
    AddedToken("<tool>", special=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("owls fly", special=False, normalized=True),
    AddedToken("<l>", special=False, lstrip=True),
    AddedToken("<r>", special=True, rstrip=True),
    AddedToken("<b>", special=True, lstrip=True, rstrip=True),
]
WORD = AddedToken("word", special=False, single_word=True)
BOS_EOS = processors.TemplateProcessing(
    single="<|im_start|> $A <|im_end|>",
    special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
)
BOTH, GIGA, FAST, NONE = ["gigatoken", "fastokens"], ["gigatoken"], ["fastokens"], []
# Name -> how to make it, and the engines that fit.
KINDS = {
    "gpt2": (byte_level, BOTH),
    "gpt2_prefix": (lambda: byte_level(pre.ByteLevel(add_prefix_space=True)), BOTH),
    "gpt2_trimmed": (lambda: byte_level(after=processors.ByteLevel(trim_offsets=True)), BOTH),
    "llama3": (lambda: byte_level(split(LLAMA_3)), BOTH),
    "qwen2": (lambda: byte_level(split(QWEN_2), norm.NFC()), BOTH),
    "gpt4o": (lambda: byte_level(split(GPT_4O)), BOTH),
    "lowercase": (lambda: byte_level(normalizer=norm.Lowercase()), FAST),
    "nfkc": (lambda: byte_level(normalizer=norm.NFKC()), NONE),
    "digits": (lambda: byte_level(pre.Sequence([pre.Digits(individual_digits=True), BYTES])), FAST),
    "added": (lambda: byte_level(split(LLAMA_3), added=ADDED), BOTH),
    "added_nfc": (lambda: byte_level(normalizer=norm.NFC(), added=[AddedToken("café!")]), BOTH),
    "single_word": (lambda: byte_level(added=[WORD]), FAST),
    "bos_eos": (lambda: byte_level(after=BOS_EOS), BOTH),
    "gemma": (
        lambda: pieces(norm.Replace(" ", "▁"), pre.Split(" ", "merged_with_previous")),
        BOTH,
    ),
    "llama2": (
        lambda: pieces(norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])),
        BOTH,
    ),
    "metaspace": (lambda: pieces(None, pre.Metaspace(prepend_scheme="first", split=False)), GIGA),
    "metaspace_split": (lambda: pieces(None, pre.Metaspace(prepend_scheme="always")), GIGA),
    "metaspace_bare": (lambda: pieces(None, pre.Metaspace(prepend_scheme="never")), GIGA),
    "unigram": (
        lambda: trained(models.Unigram(), trainers.UnigramTrainer, pre.Metaspace()),
        NONE,
    ),
    "wordpiece": (
        lambda: trained(
            models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer, pre.Whitespace()
        ),
        NONE,
    ),
}
FITTING = [(kind, name) for kind, (_, names) in KINDS.items() for name in names]

SPACE_FIRST = {"gpt2_prefix", "llama2", "metaspace", "metaspace_split"}

SPELLINGS = [
    *SPECIAL, *(token.content for token in ADDED), "</s>", "<s>", "<unk>", "<0x41>", "▁",
    "word", "swords", "café!", "cafe\u0301!", "     ", " ", "\r\n", "\n\n\n", "\0", "\t", "'s",
    "'LL", "'\u017f", "12345", "é", "e\u0301", "ﬁ", "½", "\u200d", "\u3000", "\u0085", "\u180e",
    "\u2028", *TEXT.split(), "\u0c5c", "\U00010940", "\U000323b0",
]  # fmt: skip
texts = st.lists(
    st.lists(
        st.sampled_from(SPELLINGS) | st.text(st.characters(codec="utf-8"), max_size=4), max_size=12
    ).map("".join),
    max_size=5,
)


@functools.cache
def kind(name):
    return tokenizer.Tokenizer(KINDS[name][0]())


@functools.cache
def engine(kind_name, name):
    mine = kind(kind_name)
    return fast_tokenizer.careful(fast_tokenizer.load(name, mine), mine)


def by_offsets(texts, mine):
    """Encode as the model's own tokenizer does, and place tokens by its offsets alone."""
    encoded = encode(texts, mine, False)
    ends, start = [], 0
    for text in texts:
        offsets = mine.backend_tokenizer.encode(text, add_special_tokens=False).offsets
        reached = itertools.accumulate((stop for _, stop in offsets), max)
        ends += [start + len(text[:place].encode()) for place in reached]
        start += len(text.encode())
    return replace(encoded, ends=np.array(ends, np.int64))


def spans_of(texts, first, data):
    places = (st.integers(min(first, len(text)), len(text)) for text in texts)
    return [[tuple(sorted(data.draw(st.tuples(one, one))))] for one in places]


@pytest.mark.parametrize(("name", "by"), FITTING)
@settings(max_examples=200 if FULL else 25, deadline=None)
@given(texts, st.booleans(), st.data())
def test_ids_and_masks_are_those_of_the_model_s_tokenizer(name, by, texts, special, data):
    mine = kind(name)
    encoded = encode(texts, mine, special, engine(name, by), by)
    plain = encode(texts, mine, special)
    own = [mine.backend_tokenizer.encode(text, add_special_tokens=special).ids for text in texts]
    assert encoded.ids.tolist() == plain.ids.tolist() == [number for ids in own for number in ids]
    assert encoded.counts.tolist() == plain.counts.tolist() == [*map(len, own)]
    assert encoded.ends.tolist() == plain.ends.tolist()
    assert sum(encoded.engines.values()) == len(texts)
    if not special:
        # Offsets give a space that was put before a text the place of its first character.
        spans = spans_of(texts, int(name in SPACE_FIRST), data)
        expected = mask_of(by_offsets(texts, mine), texts, spans)
        assert mask_of(encoded, texts, spans).tolist() == expected.tolist()
