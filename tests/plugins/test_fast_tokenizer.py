"""fast_tokenizer: the same ids from faster engines, or the reason for not using one."""

import functools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import TEXT, chats, must_succeed, read_record, tiny_tables
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, processors, trainers
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre

from plugsft import PluginError, RecipeError, testing
from plugsft.data import prepare, sources
from plugsft.data.defaults import DataDefaults
from plugsft.data.examples import target_mask
from plugsft.data.slices import ONE_THREAD
from plugsft.plugins import fast_tokenizer
from plugsft.plugins.fast_tokenizer import OWN, FastTokenizer
from plugsft.plugins.fast_tokenizer.engines import ENGINES, load
from plugsft.plugins.fast_tokenizer.proof import SAMPLE_TEXTS, guard, split_ids, take_sample
from plugsft.registry.load import resolve
from plugsft.tokens import tokenizer

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
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ヿ]+",
    r"[!-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
]
BYTES = pre.ByteLevel(add_prefix_space=False)


def split(*patterns):
    """Split as patterns say, and no further."""
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


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


def pieces(normalizer=None, splitter=None, spaces=()):
    """Train a tokenizer that spells unknown characters by byte, as sentencepiece makes them.

    `spaces` are runs of spaces that are merged, and added tokens too, as Gemma's.
    """
    learned = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    learned.pre_tokenizer = pre.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    learned.train_from_iterator(CORPUS[:3], trainer)
    described = json.loads(learned.to_str())
    described["added_tokens"] = [
        added_token
        for added_token in described["added_tokens"]
        if added_token["content"] in special
    ]
    vocab, flags = described["model"]["vocab"], ("lstrip", "rstrip", "single_word", "special")
    for run in spaces:
        vocab[run] = max(vocab.values()) + 1
        described["model"]["merges"].insert(len(run) - 2, ["▁", run[1:]])
        token = {"id": vocab[run], "content": run, "normalized": False}
        described["added_tokens"].append(token | dict.fromkeys(flags, False))
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
    "deepseek": (lambda: byte_level(split(*DEEPSEEK)), FAST),
    "lowercase": (lambda: byte_level(normalizer=norm.Lowercase()), FAST),
    "nfkc": (lambda: byte_level(normalizer=norm.NFKC()), NONE),
    "digits": (lambda: byte_level(pre.Sequence([pre.Digits(individual_digits=True), BYTES])), FAST),
    "added": (lambda: byte_level(split(LLAMA_3), added=ADDED), BOTH),
    "added_nfc": (lambda: byte_level(normalizer=norm.NFC(), added=[AddedToken("café!")]), BOTH),
    "single_word": (lambda: byte_level(added=[WORD]), FAST),
    "bos_eos": (lambda: byte_level(after=BOS_EOS), BOTH),
    "gemma": (
        lambda: pieces(
            norm.Replace(" ", "▁"), pre.Split(" ", "merged_with_previous"), ("▁▁", "▁▁▁")
        ),
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
text = st.lists(
    st.sampled_from(SPELLINGS) | st.text(st.characters(codec="utf-8"), max_size=4), max_size=12
).map("".join)


@functools.cache
def kind(name):
    return tokenizer.Tokenizer(KINDS[name][0]())


@functools.cache
def engine(kind_name, name):
    mine = kind(kind_name)
    return guard(load(name, mine), mine)


def touched(text, mine, span):
    """Mark the tokens that touch a span by the offsets that the tokenizer gives them."""
    offsets = mine.backend_tokenizer.encode(text, add_special_tokens=False).offsets
    return [place > 0 and a < span[1] and b > span[0] for place, (a, b) in enumerate(offsets)]


@pytest.mark.parametrize(("name", "by"), FITTING)
@settings(max_examples=200 if FULL else 12, deadline=None)
@given(st.lists(text, max_size=5), st.booleans())
def test_ids_and_ends_are_those_of_the_model_s_tokenizer(name, by, texts, special):
    mine = kind(name)
    encoded = mine.encode_texts(texts, special, engine(name, by), by)
    plain = mine.encode_texts(texts, special)
    own = [mine.backend_tokenizer.encode(text, add_special_tokens=special).ids for text in texts]
    assert encoded.ids.tolist() == plain.ids.tolist() == [number for ids in own for number in ids]
    assert encoded.counts.tolist() == plain.counts.tolist() == [*map(len, own)]
    assert encoded.ends.tolist() == plain.ends.tolist()
    assert sum(encoded.engines.values()) == len(texts)


@pytest.mark.parametrize("by", BOTH)
def test_added_tokens_for_runs_of_spaces_leave_a_text_to_the_engine(by):
    for text, own in (("the   owls  fly", 0), ("the\u2581\u2581owls", 1)):
        encoded = kind("gemma").encode_texts([text], False, engine("gemma", by), by)
        assert encoded.engines == {by: 1 - own, OWN: own}


@pytest.mark.parametrize(("name", "by"), dict(FITTING[::-1]).items())
@settings(max_examples=500 if FULL else 20, deadline=None)
@given(text, st.data())
def test_masks_by_bytes_are_those_by_offsets(name, by, text, data):
    mine = kind(name)
    encoded = mine.encode_texts([text], False, engine(name, by), by)
    if encoded.engines[OWN] or name == "gpt2_trimmed":
        return  # done by offsets, or these say less than the bytes
    # Offsets give a space that was put before a text the place of its first character.
    first = min(int(name in SPACE_FIRST), len(text))
    span = sorted(data.draw(st.tuples(*[st.integers(first, len(text))] * 2)))
    if span[0] < span[1]:
        mask = target_mask(encoded, [text], [[tuple(span)]])
        assert mask.tolist() == touched(text, mine, span)


@pytest.mark.parametrize("by", BOTH)
def test_a_character_of_any_plane_is_read_alike(by):
    mine, step = kind("llama3"), 1 if FULL else 7
    planes = [*range(0, 0x40000, step), *range(0x40000, 0x110000, 97 * step)]
    characters = [chr(code) for code in planes if not 0xD800 <= code < 0xE000]
    texts = [
        "".join(
            f"a{character}b {character}{character}1{character}'s"
            for character in characters[start : start + 16]
        )
        for start in range(0, len(characters), 16)
    ]
    encoded = mine.encode_texts(texts, False, engine("llama3", by), by)
    assert encoded.ids.tolist() == mine.encode_texts(texts, False).ids.tolist()
    # Nearly half of the places up to plane 3 hold no character yet, or a younger one.
    assert encoded.engines[by] > len(texts) / 3


@pytest.mark.parametrize(
    ("name", "by", "odd"),
    [
        ("llama3", "gigatoken", "\u0c5c's"),
        ("gpt2", "gigatoken", "\U000323b0's"),
        ("llama3", "fastokens", "'\u017fन"),
        ("deepseek", "fastokens", "  \u180e"),
    ],
)
def test_a_character_on_which_engines_disagree_is_left_to_the_tokenizer(name, by, odd):
    mine, text = kind(name), f"{odd} 東京"
    bare, _ = load(by, mine)([text])
    own = mine.backend_tokenizer.encode(text).ids
    assert bare.tolist() != own, "they agree now: fewer texts need be left to it"
    encoded = mine.encode_texts(["owls", text, "東京 🦉", text], False, engine(name, by), by)
    assert encoded.engines == {by: 2, OWN: 2}
    assert split_ids(encoded)[1].tolist() == own


def test_a_long_text_is_encoded_by_several_threads_as_by_one():
    mine, text = kind("added"), " ".join([*CORPUS, *SPECIAL, "<think>", "  owls fly"]) * 2300
    assert len(text.encode()) > 2_500_000  # from about 2 MB on, it is cut into pieces
    ids, counts = load("gigatoken", mine)([text, "owls"])
    own, theirs = mine.own_engine([text, "owls"])
    assert np.array_equal(ids, own) and counts.tolist() == theirs.tolist()


def plugin(engine="auto", first=True):
    """Make the plugin as a run does, or as one of its worker processes."""
    made = FastTokenizer(engine=engine)
    if first:
        made.check()
    return made


def choice(made, mine):
    return made.engines[id(mine)][0]


@pytest.mark.parametrize("name", KINDS)
def test_auto_takes_the_first_that_fits(name):
    mine, fitting, made = kind(name), KINDS[name][1], plugin()
    encoded = made.encode(CORPUS, mine, True)
    own = [mine.backend_tokenizer.encode(text).ids for text in CORPUS]
    assert [part.tolist() for part in split_ids(encoded)] == own
    if name == "lowercase":
        assert made.reasons["fastokens"] == "fastokens can encode only 25% of the texts"
        fitting = NONE
    taken = [*fitting, OWN][0]
    assert choice(made, mine) == taken and set(encoded.engines) == {taken, OWN}
    assert list(made.reasons) == BOTH[: BOTH.index(taken) if fitting else 2]
    assert all(reason.startswith(by) and "\n" not in reason for by, reason in made.reasons.items())


@pytest.mark.parametrize(
    ("name", "by"),
    [(name, by) for name, (_, fitting) in KINDS.items() for by in BOTH if by not in fitting],
)
def test_an_explicit_engine_that_does_not_fit_stops_the_run(name, by):
    with pytest.raises(PluginError) as caught:
        plugin(by).encode(CORPUS, kind(name), False)
    reason = "gives other ids" if name == "single_word" else "cannot load the tokenizer: "
    assert str(caught.value).startswith(f"{by} {reason}") and "\n" not in str(caught.value)
    assert str(caught.value).endswith('. Set plugins.fast_tokenizer.engine = "transformers"')


def test_an_explicit_engine_is_taken_where_it_is_of_little_use():
    made, mine = plugin("fastokens"), kind("lowercase")
    assert made.encode(CORPUS, mine, False).engines == {"fastokens": 3, OWN: 9}


def test_the_model_s_own_tokenizer_can_be_asked_for():
    made, mine = plugin(OWN), kind("gpt2")
    assert made.encode(CORPUS, mine, False).engines == {OWN: 12}
    assert made.reasons == {}


def test_engines_that_are_not_installed(monkeypatch):
    mine, missing = kind("gpt2"), "{0} is not installed: pip install 'plugsft[fast]'".format
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(RecipeError, match=re.escape(missing("gigatoken"))):
        plugin("gigatoken")
    with pytest.raises(PluginError, match=re.escape(missing("gigatoken"))):
        plugin("gigatoken", first=False).encode(CORPUS, mine, False)
    for first in (True, False):
        made = plugin(first=first)
        made.encode(CORPUS, mine, False)
        assert choice(made, mine) == "fastokens" and made.summary() == missing("gigatoken")
    monkeypatch.setitem(sys.modules, "fastokens", None)
    with pytest.raises(RecipeError, match=re.escape(missing("gigatoken"))):
        plugin()
    made = plugin(first=False)
    assert made.encode(CORPUS, mine, False).engines == {OWN: 12}
    none = "warning: no engine fits, so the model's own tokenizer encodes ("
    reasons = f"{missing('gigatoken')}; {missing('fastokens')}"
    assert made.summary() == f"{none}{reasons}). Remove [plugins.fast_tokenizer]"
    made.counts = {"gigatoken": 12}  # tokens from a cache
    assert made.summary() == f"gigatoken encoded 12 of 12 texts; {reasons}"


def test_no_engine_is_needed_to_import_the_plugin():
    script = "import sys; sys.modules.update(gigatoken=None, fastokens=None)\n"
    script += f"import {fast_tokenizer.__name__} as it; it.FastTokenizer(engine='{OWN}').check()"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_each_tokenizer_has_a_proof_of_its_own():
    made = plugin()
    for name, taken in (("gpt2", "gigatoken"), ("digits", "fastokens"), ("nfkc", OWN)):
        assert made.encode([], kind(name), True).ids.tolist() == []
        assert id(kind(name)) not in made.engines
        made.encode(CORPUS, kind(name), False)
        assert choice(made, kind(name)) == taken
    assert choice(made, kind("gpt2")) == "gigatoken"


BAD = "a text of its own"


def spoil(monkeypatch, do):
    """Make gigatoken wrong: do(text, ids, tokenizer) returns the ids of a text."""

    def load(mine, whole=ENGINES["gigatoken"]):
        right = whole(mine)

        def wrong(texts):
            ids, counts = right(texts)
            parts = np.split(ids, np.cumsum(counts)[:-1])
            spoilt = [
                np.array(do(text, part.tolist(), mine), np.int32)
                for text, part in zip(texts, parts, strict=True)
            ]
            return np.concatenate(spoilt), np.array([*map(len, spoilt)])

        return wrong

    monkeypatch.setitem(ENGINES, "gigatoken", load)


def letters(text, ids, mine):
    """Spell one text letter by letter: its bytes are right, its ids are not."""
    vocab = mine.backend_tokenizer.get_vocab()
    return [vocab["Ġ" if one == " " else one] for one in text] if text == BAD else ids


def test_wrong_ids_are_caught_by_the_proof(monkeypatch):
    spoil(monkeypatch, letters)
    mine, said = kind("gpt2"), f"gigatoken gives other ids .* for the text '{BAD}'"
    made = plugin()
    encoded = made.encode([*CORPUS, BAD], mine, False)
    assert encoded.ids.tolist() == mine.encode_texts([*CORPUS, BAD], False).ids.tolist()
    assert choice(made, mine) == "fastokens" and re.fullmatch(said + r"\w*", made.summary())
    # In a worker process, others may have trusted it by now.
    for other in (plugin("gigatoken"), plugin(first=False)):
        with pytest.raises(PluginError, match=said + r"\. Set .* = \"transformers\"$"):
            other.encode([*CORPUS, BAD], mine, False)


def test_wrong_ids_are_caught_later_by_a_look_at_one_text(monkeypatch):
    spoil(monkeypatch, letters)
    mine, made = kind("bos_eos"), plugin()
    made.encode(CORPUS, mine, True)
    assert choice(made, mine) == "gigatoken"
    made.encode(["owls", "fly", "far"], mine, True)
    with pytest.raises(PluginError, match=f"gigatoken gives other ids .* '{BAD}'. Set"):
        made.encode(["owls", BAD, "far"], mine, True)


# An id that there is not costs its own text only, too.
@pytest.mark.parametrize("wrong", [3, 1_000_000, -1])
def test_wrong_bytes_are_caught_in_every_text(monkeypatch, wrong):
    spoil(monkeypatch, lambda text, ids, mine: [wrong, *ids[1:]] if text == BAD else ids)
    mine, made, texts = kind("gpt2"), plugin(), [BAD, *CORPUS, BAD]
    made.encode(CORPUS, mine, False)
    encoded, own = made.encode(texts, mine, False), mine.encode_texts(texts, False)
    assert encoded.engines == {"gigatoken": 12, OWN: 2}
    assert encoded.ids.tolist() == own.ids.tolist()
    assert encoded.ends.tolist() == own.ends.tolist()


class PanicException(BaseException):
    """What Rust's panics are in Python."""


@pytest.mark.parametrize("error", [ValueError, PanicException])
def test_a_text_that_an_engine_refuses_is_done_by_the_model_s_own(monkeypatch, error):
    def refuse(text, ids, mine):
        if text == BAD:
            raise error("too much")
        return ids

    spoil(monkeypatch, refuse)
    mine, made, texts = kind("gpt2"), plugin(), [*CORPUS, BAD, *CORPUS, BAD, BAD]
    for _ in range(2):
        encoded = made.encode(texts, mine, False)
        assert encoded.engines == {"gigatoken": 24, OWN: 3}
        assert encoded.ids.tolist() == mine.encode_texts(texts, False).ids.tolist()


def test_ctrl_c_in_an_engine_is_not_swallowed(monkeypatch):
    def interrupt(*given):
        raise KeyboardInterrupt

    spoil(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        plugin().encode(CORPUS, kind("gpt2"), False)
    monkeypatch.setitem(ENGINES, "gigatoken", interrupt)
    with pytest.raises(KeyboardInterrupt):
        plugin().encode(CORPUS, kind("gpt2"), False)


def test_an_engine_that_panics_while_loading_is_passed_over(monkeypatch):
    def panic(mine):
        raise PanicException("index out of bounds\nsomewhere")

    monkeypatch.setitem(ENGINES, "gigatoken", panic)
    made = plugin()
    made.encode(CORPUS, kind("gpt2"), False)
    assert made.summary() == "gigatoken cannot load the tokenizer: index out of bounds"


def test_a_sample_is_from_all_over_and_small():
    most = SAMPLE_TEXTS
    for count in (0, 1, most - 1, most, most + 1, 5_000):
        texts = [str(number) for number in range(count)]
        sample = take_sample(texts)
        assert min(count, most // 2) <= len(sample) <= most
        assert sample[:1] == texts[:1] and (count < 2 or int(sample[-1]) > count * 0.98 - 2)
    assert len(take_sample(["x" * 100_000] * 40)) < 5


THREADS = """
import os, psutil, sys, tokenizers
os.sched_setaffinity(0, range(os.cpu_count()))
from plugsft.base.machine import look
from plugsft.data_kit import Tokenizer
from plugsft.plugins.fast_tokenizer.engines import load
engine = load(sys.argv[2], Tokenizer(tokenizers.Tokenizer.from_file(sys.argv[1])))
def others():
    spent = {one.id: one.user_time for one in psutil.Process().threads()}
    return sum(spent.values()) - spent[os.getpid()]
before = others()
for number in range(12):
    engine([f"{one} brown owls read {one * number}. " * 20 for one in range(10_000)])
print(others() - before, look().cores)
"""


@pytest.mark.parametrize("by", BOTH)
def test_an_engine_takes_one_thread_in_a_worker(by, tmp_path):
    kind("gpt2").backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", THREADS, str(tmp_path / "tokenizer.json"), by]

    def seconds_of_others(**env):
        result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return tuple(map(float, result.stdout.split()))

    seconds, _ = seconds_of_others(**ONE_THREAD)
    assert seconds < 0.02
    seconds, cores = seconds_of_others()
    assert (seconds > 0.02) == (by == "fastokens" and cores > 1)


def test_workers_encode_and_the_run_counts_their_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SLICE_ROWS", 7)
    tables = tiny_tables(tmp_path, [*chats(24), {"messages": chats(1)[0]["messages"] * 2}])
    folders = {}
    for name in ("fast", "plain"):
        tables["output"] = str(tmp_path / name)
        tables["plugins"] = {"multiprocess_tokenize": {"workers": 2}, "fast_tokenizer": {}}
        if name == "plain":
            tables["plugins"] = {}
        recipe, active = resolve(tables)
        active.attach(DataDefaults(recipe.folder))
        folders[name] = prepare.prepare(recipe, active).tokens
    content = {
        name: [path.read_bytes() for path in sorted(tokens.folder.glob("data-*"))]
        for name, tokens in folders.items()
    }
    assert content["fast"] == content["plain"] and len(content["fast"]) == 4
    assert folders["fast"].facts["engines"] == {"gigatoken": 25, OWN: 0}


def test_a_run_names_the_engine_that_encoded(tiny, tmp_path):
    rows = chats(24)
    rows[7]["messages"][0]["content"] += " \U000323b0, which is younger than most programs"
    recipe = tiny(rows, plugins={"fast_tokenizer": {}}, eval={"split": "train[:4]"})
    result = must_succeed(recipe)
    assert re.search(r"tokens by gigatoken and transformers, \d+% trained on", result.stdout)
    [record] = read_record(tmp_path / "run")["plugins"]
    assert record["summary"] == (
        "gigatoken encoded 23 of 24 texts, the model's own tokenizer 1 "
        "(texts that it normalizes, or with characters that engines encode differently)"
    )


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({}, ""),
        ({"gigatoken": 20_000, OWN: 0}, "gigatoken encoded 20,000 of 20,000 texts"),
        ({OWN: 1_500}, "the model's own tokenizer encoded 1,500 texts"),
        ({"gigatoken": 3, "fastokens": 4}, "gigatoken encoded 3, fastokens encoded 4 of 7 texts"),
    ],
)
def test_the_summary_is_what_was_counted(counts, says):
    made = plugin()
    made.counts = counts
    assert made.summary() == says


def test_it_keeps_the_laws():
    testing.keeps_gradients("fast_tokenizer")
    testing.survives_a_worker("fast_tokenizer")
    testing.summary("fast_tokenizer", {"engine": "fastokens"})
