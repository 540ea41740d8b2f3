"""What the data path needs of a tokenizer, and the core's answer to `encode`. Needs no torch."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers
from numpy.typing import NDArray

from .types import Encoded, Ints

Ids = NDArray[np.int32]
Engine = Callable[[list[str]], tuple[Ids, Ints]]
"""Texts -> flat ids, without the tokenizer's first and last tokens, and how many each text has."""

OWN = "transformers"
"""The name of the model's own tokenizer among the engines."""
TEXTS = 256
"""So many are encoded at a time: what the library returns for a token is a hundred bytes."""


@dataclass
class Tokenizer:
    """A tokenizer that travels to other processes; its fields are named as in transformers."""

    backend_tokenizer: tokenizers.Tokenizer
    chat_template: str | None = None
    special_tokens_map: dict[str, str] | None = None
    """Names such as eos_token -> text."""

    def __getstate__(self) -> dict[str, Any]:
        kept = ("backend_tokenizer", "chat_template", "special_tokens_map")
        return {name: vars(self)[name] for name in kept}

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    @property
    def eos_token(self) -> str:
        """The text that ends a document, if any."""
        return (self.special_tokens_map or {}).get("eos_token", "")

    @cached_property
    def spelling(self) -> pa.Array:
        """The bytes that each id stands for, as far as they can be told from the vocabulary."""
        description = self.backend_tokenizer.to_str()
        byte_level = '"ByteLevel"' in description
        added = {entry["id"] for entry in json.loads(description)["added_tokens"]}
        spelt = [b""] * (max(self.backend_tokenizer.get_vocab().values(), default=-1) + 1)
        for text, number in self.backend_tokenizer.get_vocab().items():
            spelt[number] = text.encode() if number in added else _spell(text, byte_level)
        return pa.array(spelt, pa.binary())

    @cached_property
    def surroundings(self) -> tuple[Ids, Ids]:
        """The tokens that it adds before and after a text, where it is asked to."""
        whole, plain = (
            self.backend_tokenizer.encode("a", add_special_tokens=add).ids for add in (True, False)
        )
        before = next(n for n in range(len(whole) + 1) if whole[n : n + len(plain)] == plain)
        return (
            np.array(whole[:before], np.int32),
            np.array(whole[before + len(plain) :], np.int32),
        )

    def own_engine(self, texts: list[str]) -> tuple[Ids, Ints]:
        """Encode with the model's own fast tokenizer."""
        ids, counts = [np.zeros(0, np.int32)], []
        for first in range(0, len(texts), TEXTS):
            encoded = self.backend_tokenizer.encode_batch_fast(
                texts[first : first + TEXTS], add_special_tokens=False
            )
            ids += [np.array(one.ids, np.int32) for one in encoded]
            counts += [len(one) for one in encoded]
        return np.concatenate(ids), np.array(counts, np.int64)


def lighten(tokenizer: Any) -> Tokenizer:
    """Keep of a tokenizer of transformers what the data path needs."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return Tokenizer(tokenizer.backend_tokenizer, template, names)


def encode(
    texts: list[str],
    tokenizer: Tokenizer,
    special_tokens: bool,
    engine: Engine | None = None,
    name: str = OWN,
) -> Encoded:
    """Encode with an engine, the model's own unless given, and find where the tokens end.

    Where the tokens of a text spell it byte for byte, their lengths say where they end. Else (its
    normalizer changed it, or its vocabulary hides what a token spells) the offsets of the model's
    own tokenizer do, and its ids are taken.
    """
    ids, counts = (engine or tokenizer.own_engine)(texts)
    ends, wrong = _place(ids, counts, texts, tokenizer)
    if wrong:
        ids, counts, ends = _encode_slowly(ids, counts, ends, texts, wrong, tokenizer)
    if special_tokens:
        ids, counts, ends = _surround(ids, counts, ends, *tokenizer.surroundings)
    engines = {name: len(texts)}
    if name != OWN:
        engines = {name: len(texts) - len(wrong), OWN: len(wrong)}
    return Encoded(ids, counts, ends, engines)


def _place(
    ids: Ids, counts: Ints, texts: list[str], tokenizer: Tokenizer
) -> tuple[Ints, list[int]]:
    """Return where tokens end by what they spell, and the texts that they do not spell."""
    try:
        spelt = tokenizer.spelling.take(pa.array(ids))
    except IndexError:
        return np.zeros(len(ids), np.int64), list(range(len(texts)))
    made = np.frombuffer(spelt.buffers()[2] or b"", np.uint8)
    offsets = np.frombuffer(spelt.buffers()[1], np.int32) if len(ids) else np.zeros(1, np.int32)
    ends = offsets[1 : len(ids) + 1].astype(np.int64)
    stops = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(counts)])]
    whole = "".join(texts).encode()
    places = np.concatenate([[0], np.cumsum(byte_sizes(texts))])
    if np.array_equal(stops, places) and made[: len(whole)].tobytes() == whole:
        return ends, []
    lead, wrong = np.zeros(len(texts), np.int64), []
    for number in range(len(texts)):
        text = whole[places[number] : places[number + 1]]
        spelling = made[stops[number] : stops[number + 1]].tobytes()
        if spelling == b" " + text:
            # Some vocabularies put a space before every text.
            lead[number] = 1
        elif spelling != text:
            wrong.append(number)
    ends = ends - np.repeat(stops[:-1] + lead - places[:-1], counts)
    return np.maximum(ends, np.repeat(places[:-1], counts)), wrong


def byte_sizes(texts: list[str]) -> Ints:
    """Return how many bytes of UTF-8 each text has."""
    sizes = (len(text) if text.isascii() else len(text.encode()) for text in texts)
    return np.fromiter(sizes, np.int64, len(texts))


def _encode_slowly(
    ids: Ids,
    counts: Ints,
    ends: Ints,
    texts: list[str],
    wrong: list[int],
    tokenizer: Tokenizer,
) -> tuple[Ids, Ints, Ints]:
    """Put the offsets and ids of the model's own tokenizer in the place of some texts' tokens."""
    cuts = np.cumsum(counts)[:-1]
    all_ids, all_ends = np.split(ids, cuts), np.split(ends, cuts)
    starts = np.concatenate([[0], np.cumsum(byte_sizes(texts))])
    counts = counts.copy()
    for first in range(0, len(wrong), TEXTS):
        some = wrong[first : first + TEXTS]
        encoded = tokenizer.backend_tokenizer.encode_batch(
            [texts[number] for number in some], add_special_tokens=False
        )
        for number, one in zip(some, encoded, strict=True):
            all_ids[number] = np.array(one.ids, np.int32)
            counts[number] = len(one.ids)
            # A token that starts before the end of another (a character's bytes) ends with it.
            last = np.array(one.offsets, np.int64).reshape(-1, 2)[:, 1]
            places = char_places(texts[number])[np.maximum.accumulate(last)]
            all_ends[number] = places + starts[number]
    return np.concatenate(all_ids), counts, np.concatenate(all_ends)


def char_places(text: str) -> Ints:
    """Return the byte at which each character begins, and the end."""
    raw = np.frombuffer(text.encode(), np.uint8)
    return np.append(np.flatnonzero((raw & 0xC0) != 0x80), len(raw))


def _surround(
    ids: Ids, counts: Ints, ends: Ints, before: Ids, after: Ids
) -> tuple[Ids, Ints, Ints]:
    """Add the tokenizer's own first and last tokens to each text; they spell nothing."""
    stops = np.cumsum(counts)
    starts = stops - counts
    # Text by text, so that of two tokens put into one place the first stays the first.
    where = np.repeat(np.stack([starts, stops], 1), [len(before), len(after)], 1).ravel()
    added = np.tile(np.concatenate([before, after]), len(counts))
    # What is put before a text ends where the text begins: at the end of what stands before it.
    reached = np.concatenate([[0], ends])[where]
    return (
        np.insert(ids, where, added),
        counts + len(before) + len(after),
        np.insert(ends, where, reached),
    )


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte for which each character of a byte-level vocabulary stands."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


BYTES = _bytes_of_characters()


def _spell(text: str, byte_level: bool) -> bytes:
    if byte_level:
        return bytes(BYTES.get(character, 0) for character in text)
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
