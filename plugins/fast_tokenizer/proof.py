"""The proof that an engine gives the ids of the model's own tokenizer."""

import unicodedata

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, pre_tokenizers

from plugsft import Encoded
from plugsft.data_kit import Tokenizer

from .engines import Engine, Ids, UnusableEngine, ensure_engine_error

SAMPLE_TEXTS = 96
"""Texts of the run, and added tokens of the tokenizer, in the proof."""
SAMPLE_CHARACTERS = 250_000
"""Most characters of the sample; the model's own tokenizer takes 0.25 s for them."""
PROBE = "a{0}b {0}{0}1{0}'s  {0}\n{0}."
"""Places where engines may treat a character or an added token differently."""
CHARACTERS = [
    character
    for character in map(chr, range(9, 0x32000, 199))
    if unicodedata.category(character) not in ("Cn", "Cs")
]
# Engines differ in three kinds of characters: younger ones than the Unicode of the tokenizer's
# library, the long s (U+017F), and U+180E, which is no space since Unicode 6.3.
REMOVE_COMMON = pre_tokenizers.Split(Regex(r"[^\p{Cn}\u017f\u180e]+"), "removed")


def guard(engine: Engine, tokenizer: Tokenizer) -> Engine:
    """Wrap an engine to give no tokens for texts that it refuses or may encode differently.

    Such a text is not what its tokens decode to, so the model's own tokenizer encodes it.
    """
    token_bytes = np.array(tokenizer.token_bytes.to_pylist(), object)
    token_texts = [token.decode(errors="replace") for token in token_bytes]
    # A token whose bytes are not whole characters may be a part of a rare one.
    rare = _rare_characters("".join(token_texts)) | {"\N{REPLACEMENT CHARACTER}"}
    suspect = np.array([not rare.isdisjoint(text) for text in token_texts])

    def encode_accepted(texts: list[str]) -> Ids:
        """Encode the texts that the engine accepts; search for the others by halves."""
        try:
            return engine(texts)
        except BaseException as error:
            ensure_engine_error(error)
        if len(texts) == 1:
            return np.zeros(0, np.int32), np.zeros(1, np.int64)
        middle = len(texts) // 2
        halves = [encode_accepted(texts[:middle]), encode_accepted(texts[middle:])]
        ids, counts = zip(*halves, strict=True)
        return np.concatenate(ids), np.concatenate(counts)

    def encode_common(texts: list[str]) -> Ids:
        """Encode the texts without rare characters."""
        ids, counts = encode_accepted(texts)
        suspects = token_bytes.take(ids[suspect.take(ids, mode="clip")], mode="clip")
        if rare_now := _rare_characters(b"".join(suspects).decode(errors="ignore")):
            is_rare = np.array([not rare_now.isdisjoint(text) for text in texts])
            ids, counts = ids[~np.repeat(is_rare, counts)], np.where(is_rare, 0, counts)
        return ids, counts

    return encode_common


def prove(name: str, engine: Engine, texts: list[str], tokenizer: Tokenizer) -> float:
    """Compare an engine's ids with the tokenizer's own; return the share of texts it encodes.

    On a sample of the texts, and on probes in which engines differ: added tokens, rare characters.
    """
    added_tokens = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    added = take_sample([token.content for token in added_tokens])
    probes = [PROBE.format(part) for part in [*CHARACTERS, *added]]
    sample = take_sample(texts)
    for batch in (probes, sample):
        encoded = tokenizer.encode_texts(batch, False, engine, name)
        own = tokenizer.encode_texts(batch, False)
        for text, ids, own_ids in zip(batch, split_ids(encoded), split_ids(own), strict=True):
            if not np.array_equal(ids, own_ids):
                raise UnusableEngine(_explain_difference(name, text), batch is sample)
    return encoded.engines[name] / len(sample)


def compare_one(
    name: str, encoded: Encoded, texts: list[str], tokenizer: Tokenizer, special_tokens: bool
) -> str | None:
    """Compare the ids of one of the texts with the tokenizer's own; return the difference."""
    number = len(texts) // 2
    own = tokenizer.backend_tokenizer.encode(texts[number], add_special_tokens=special_tokens)
    ids = split_ids(encoded)[number]
    return None if ids.tolist() == own.ids else _explain_difference(name, texts[number])


def take_sample(items: list[str]) -> list[str]:
    """Return items from all over a list, few enough for a slow tokenizer."""
    characters = sum(map(len, items))
    return items[:: max((len(items) - 1) // SAMPLE_TEXTS, characters // SAMPLE_CHARACTERS) + 1]


def split_ids(encoded: Encoded) -> list[NDArray[np.int32]]:
    """Return the ids of each text."""
    return np.split(encoded.ids, np.cumsum(encoded.counts)[:-1])


def _rare_characters(text: str) -> set[str]:
    """Return the characters of a text that engines may treat differently."""
    pieces = REMOVE_COMMON.pre_tokenize_str("".join(set(text)))
    return {character for piece, _ in pieces for character in piece}


def _explain_difference(name: str, text: str) -> str:
    return f"{name} gives other ids than the model's own tokenizer for the text {text[:60]!r}"
