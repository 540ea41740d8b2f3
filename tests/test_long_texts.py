"""Texts far longer than data.max_length are encoded in part, with the same result."""

import random
import resource
import time
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from conftest import FULL, TEXT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from plugsft.base.types import Rendered, Shard
from plugsft.data.slices import make_examples, trained_mask
from plugsft.recipe.tables import Data
from plugsft.tokens import tokenizer as of_tokenizers
from plugsft.tokens.tokenizer import shorten

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Digits are counted from the right: the first three depend on where the last one stands.
RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*\b)|[^\s\p{N}]+|\s+"
SAMPLE = [
    TEXT,
    "0123 456 789,012 ",
    "a" * 30,
    "naïve é e\u0301 日本語、テスト。 ",
    "  \n\n\t  ",
    "🦉👩‍👩‍👧",
] * 3
TRAIN = {"special_tokens": ["<unk>", "<|end|>"], "show_progress": False, "vocab_size": 420}


def trained(model, trainer, normalizer=None, pre_tokenizer=None):
    made = Tokenizer(model)
    if normalizer:
        made.normalizer = normalizer
    if pre_tokenizer:
        made.pre_tokenizer = pre_tokenizer
    made.train_from_iterator(SAMPLE, trainer)
    made.add_special_tokens([AddedToken("<|mask|>", lstrip=True, rstrip=True)])
    both = [("<unk>", 0), ("<|end|>", 1)]
    made.post_processor = processors.TemplateProcessing(
        single="<unk> $A <|end|>", special_tokens=both
    )
    return of_tokenizers.Tokenizer(made)


def byte_level(split=None, normalizer=None):
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split:
        letters = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), letters])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **TRAIN)
    return trained(models.BPE(), trainer, normalizer, letters)


def llama2():
    """No pre-tokenizer: words are told apart by what the vocabulary holds alone."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_too = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        special_tokens=["<unk>", *bytes_too], vocab_size=700, show_progress=False
    )
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = spaces
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    words = [piece for one in SAMPLE for piece in one.replace(" ", " ▁").split(" ")]
    made.train_from_iterator(words, trainer)
    made.pre_tokenizer = None
    return of_tokenizers.Tokenizer(made)


HEX = r"[0-9a-f]{1,4}(?=(?:[0-9a-f]{4})*\b)|\S|\s+"
COMMENTS = normalizers.Replace(Regex(r"<!--[\s\S]*?-->"), "")
KINDS = {
    "hexadecimal from the right": lambda: byte_level(HEX),
    "comments are taken out": lambda: byte_level(None, COMMENTS),
    "byte-level": byte_level,
    "llama 3": lambda: byte_level(LLAMA3),
    "NFC": lambda: byte_level(LLAMA3, normalizers.NFC()),
    "digits from the right": lambda: byte_level(RIGHT),
    "llama 2": llama2,
    "unigram": lambda: trained(
        models.Unigram(),
        trainers.UnigramTrainer(unk_token="<unk>", **TRAIN),
        normalizers.NFKC(),
        pre_tokenizers.Metaspace(),
    ),
    "wordpiece": lambda: trained(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer(**TRAIN),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    ),
    "each space a word": lambda: trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(**TRAIN),
        None,
        pre_tokenizers.Split(" ", "isolated"),
    ),
}
UNITS = [
    *(word + " " for word in TEXT.split()[:9]),
    *(" ", "  ", "\n", "\n\n", "\t", "a", "x", "7", "12"),
    *("日本語", "、", "。", "é", "e\u0301", "🦉", "👩‍👩‍👧", "\0"),
    *("naïve", ".", "!?", "<|mask|>", "<|end|>"),
]
LONG = 60_000


@st.composite
def long_texts(draw):
    """Texts of a few parts; each part repeats or mixes a few units."""
    text, mixed = "", random.Random(draw(st.integers(0, 999)))
    for _ in range(draw(st.integers(1, 4))):
        units = draw(st.lists(st.sampled_from(UNITS), min_size=1, max_size=5))
        size = draw(st.sampled_from([3, 100, 4000, 30_000]))
        repeat = draw(st.booleans())
        pieces = units * size if repeat else mixed.choices(units, k=size)
        text += "".join(pieces)[:size]
    return text + draw(st.sampled_from(["", "<|mask|>", "1", " a", "\u0301"]))


@pytest.fixture(scope="module")
def kinds():
    return {name: make() for name, make in KINDS.items()}


def spans_of(size, places):
    cuts = sorted({min(size, place) for place in places} | {0, size})
    return [pair for number, pair in enumerate(pairwise(cuts)) if number % 2]


def outcome(tokenizer, rendered, data):
    """Everything that later stages see of some rows."""
    shard = Shard("")
    encoded = tokenizer.encode_texts(rendered.texts, rendered.special_tokens)
    numbers = np.arange(len(set(rendered.rows)))
    mask = trained_mask(encoded, rendered)
    examples = make_examples(encoded, mask, rendered, numbers, data, shard)
    return {name: np.asarray(one).tolist() for name, one in vars(examples).items()} | asdict(shard)


def check(tokenizer, rendered, limit):
    """Compare what comes of texts and of their beginnings; return these."""
    short = shorten(rendered, tokenizer, limit)
    for too_long in ("truncate", "drop"):
        options = Data(source="x", max_length=limit, too_long=too_long)
        assert outcome(tokenizer, short, options) == outcome(tokenizer, rendered, options)
    return short


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_shortened_text_equal_those_of_the_whole(kinds, kind):
    tokenizer, shortened, tried = kinds[kind], [], []

    @settings(
        max_examples=400 if FULL else 12,
        deadline=None,
        derandomize=not FULL,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.data())
    def same(data):
        pair = data.draw(st.booleans())
        head = data.draw(st.sampled_from(["", "owls ", "7", "日本語 ", "owls " * 400]))
        texts = [head + data.draw(long_texts()) for _ in range(1 + pair)]
        place = st.lists(st.sampled_from([0, 1, 5, 40, 90, 3000, LONG]), max_size=3)
        spans = [spans_of(len(text), [len(head), *data.draw(place)]) for text in texts]
        rendered = Rendered(texts, spans, rows=[0] * len(texts), special_tokens=True)
        limit = data.draw(st.sampled_from([2, 7, 30]))
        short = check(tokenizer, rendered, limit)
        tried.append(max(map(len, texts)) > 64 * (limit + 64))
        shortened.append(any(map(str.__ne__, short.texts, texts)))

    same()
    if kind == "comments are taken out":
        assert not any(shortened)
    else:
        assert sum(shortened) > sum(tried) // 20, (sum(shortened), sum(tried))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "comments" not in kind])
def test_runs_of_one_character_and_late_answers(kinds, kind):
    ends = ((9000, ""), (9001, "<|mask|>"), (9002, " a"), (9003, "-->"))
    for number, unit in enumerate(("7", " ", "\n", "a", "日、", "12 ", "3f9", "<!-- owls ")):
        for size, end in ends if FULL else [ends[number % 4]]:
            rendered = Rendered([unit * size + end], [[(0, size)]], rows=[0])
            check(kinds[kind], rendered, 7)
    # One answer is trained from the first words on, the other one far behind them.
    for late in (90, 3000, 7000):
        texts = ["owls " * 2000, "owls hunt " * 1000]
        check(kinds[kind], Rendered(texts, [[(late, 10_000)], [(4, 10_000)]], rows=[0, 0]), 7)


@pytest.mark.parametrize("kind", ["byte-level", "llama 2", "unigram"])
def test_ten_megabytes_are_encoded_in_no_time(kinds, kind):
    text = TEXT * (10_000_000 // len(TEXT))
    rendered = Rendered([text], [[(0, len(text))]], rows=[0])
    began = time.process_time()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (short,) = shorten(rendered, kinds[kind], 512).texts
    assert len(short) < 100_000 and text.startswith(short)
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50 << 10
