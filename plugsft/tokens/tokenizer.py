"""What the data path needs of a tokenizer, and the core's answer to `encode`. Needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers
from numpy.typing import NDArray

from ..base.types import Encoded, Ints

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
        backend = self.backend_tokenizer
        parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
        spell = _spell_bytes if any("ByteLevel" in repr(part) for part in parts) else _spell_text
        added, vocab = backend.get_added_tokens_decoder(), backend.get_vocab()
        spelt = [b""] * (max(vocab.values(), default=-1) + 1)
        for text, number in vocab.items():
            spelt[number] = text.encode() if number in added else spell(text)
        offsets = np.append(0, np.cumsum([len(one) for one in spelt])).astype(np.int32)
        return pa.Array.from_buffers(
            pa.binary(), len(spelt), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(spelt))]
        )

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

    @cached_property
    def neighbours(self) -> frozenset[str]:
        """All pairs of adjacent characters in the vocabulary's tokens."""
        vocab = self.backend_tokenizer.get_vocab(with_added_tokens=False)
        return frozenset(token[n : n + 2] for token in vocab for n in range(len(token) - 1))

    def never_joined(self, before: str, after: str) -> bool:
        """Tell whether no token can cross the border between two tokens."""
        model = self.backend_tokenizer.model
        if not isinstance(model, tokenizers.models.BPE | tokenizers.models.Unigram):
            return False
        affixes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if any(getattr(model, name, None) for name in affixes):
            return False
        # Names of byte tokens and of the unknown token are not their text.
        unknown = getattr(model, "unk_token", None)
        if any(one == unknown or (one[:1] + one[-1:]) == "<>" for one in (before, after)):
            return False
        return before[-1:] + after[:1] not in self.neighbours

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

    Where the tokens of a text spell it byte for byte, their lengths say where they end. Else the
    model's own tokenizer does it; and where its tokens do not spell it either (its normalizer
    changed it, or its vocabulary hides what a token spells), their offsets say it.
    """
    ids, counts = (engine or tokenizer.own_engine)(texts)
    ends, wrong = _place(ids, counts, texts, tokenizer)
    if wrong:
        ids, counts, ends = _encode_slowly(ids, counts, ends, texts, wrong, tokenizer)
    if special_tokens and any(map(len, tokenizer.surroundings)):
        ids, counts, ends = _surround(ids, counts, ends, *tokenizer.surroundings)
    engines = {name: len(texts)}
    if name != OWN:
        engines = {name: len(texts) - len(wrong), OWN: len(wrong)}
    return Encoded(ids, counts, ends, engines)


def size_of(text: str, start: int, stop: int) -> int:
    """Return the bytes of a stretch of a text."""
    # Where every character is a byte, as in most texts, there is nothing to encode.
    return stop - start if text.isascii() else len(text[start:stop].encode())


def _sizes(texts: list[str]) -> Ints:
    return np.array([size_of(text, 0, len(text)) for text in texts], np.int64)


def _place(
    ids: Ids, counts: Ints, texts: list[str], tokenizer: Tokenizer
) -> tuple[Ints, list[int]]:
    """Return where tokens end by what they spell, and the texts that they do not spell."""
    sizes, stops = _sizes(texts), _stops(counts)
    starts = np.cumsum(sizes) - sizes
    ends, wrong = np.empty(len(ids), np.int64), []
    # Few at a time: what they spell stays near the processor.
    for first in range(0, len(texts), TEXTS):
        few = slice(first, first + TEXTS)
        tokens = slice(stops[first], stops[min(first + TEXTS, len(texts))])
        found, failed = _place_few(ids[tokens], counts[few], texts[few], sizes[few], tokenizer)
        np.add(found, starts[first], out=ends[tokens])
        wrong += [first + number for number in failed]
    return ends, wrong


def _place_few(
    ids: Ids, counts: Ints, texts: list[str], sizes: Ints, tokenizer: Tokenizer
) -> tuple[NDArray[Any], list[int]]:
    try:
        # Not pa.array(): that imports pandas, which takes longer than many a slice.
        buffers = [None, pa.py_buffer(np.ascontiguousarray(ids, np.int32))]
        spelt = tokenizer.spelling.take(pa.Array.from_buffers(pa.int32(), len(ids), buffers))
    except IndexError:
        return np.zeros(len(ids), np.int32), list(range(len(texts)))
    _, offsets, made = spelt.buffers() if len(ids) else (None, bytes(4), None)
    made = made or pa.py_buffer(b"")
    ends = np.frombuffer(offsets, np.int32, len(ids) + 1)
    stops, places = ends[_stops(counts)], _stops(sizes)
    ends = ends[1:]
    if np.array_equal(stops, places) and made.slice(0, places[-1]).equals(
        pa.py_buffer("".join(texts).encode())
    ):
        return ends, []
    lead, wrong = np.zeros(len(texts), np.int64), []
    for number, text in enumerate(texts):
        spelling = made.slice(stops[number], stops[number + 1] - stops[number]).to_pybytes()
        raw = text.encode()
        if spelling == b" " + raw:
            # Some vocabularies put a space before every text.
            lead[number] = 1
        elif spelling != raw:
            wrong.append(number)
    moved = ends - np.repeat(stops[:-1] + lead - places[:-1], counts)
    return np.maximum(moved, np.repeat(places[:-1], counts)), wrong


def _stops(counts: Ints) -> Ints:
    """Return 0, and where each of so many parts ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _encode_slowly(
    ids: Ids,
    counts: Ints,
    ends: Ints,
    texts: list[str],
    wrong: list[int],
    tokenizer: Tokenizer,
) -> tuple[Ids, Ints, Ints]:
    """Put what the model's own tokenizer makes of some texts in the place of their tokens."""
    stops, sizes = _stops(counts), _sizes(texts)
    starts = np.cumsum(sizes) - sizes
    counts, left = counts.copy(), 0
    all_ids, all_ends = [], []
    for first in range(0, len(wrong), TEXTS):
        some = wrong[first : first + TEXTS]
        encoded = tokenizer.backend_tokenizer.encode_batch(
            [texts[number] for number in some], add_special_tokens=False
        )
        for number, one in zip(some, encoded, strict=True):
            own, count = np.array(one.ids, np.int32), np.array([len(one.ids)])
            found, failed = _place_few(own, count, [texts[number]], sizes[[number]], tokenizer)
            if failed:
                # A token that starts before the end of another (a character's bytes) ends with it.
                last = np.array(one.offsets, np.int64).reshape(-1, 2)[:, 1]
                found = char_places(texts[number])[np.maximum.accumulate(last)]
            kept = slice(stops[left], stops[number])
            all_ids += [ids[kept], own]
            all_ends += [ends[kept], found + starts[number]]
            counts[number], left = count[0], number + 1
    all_ids.append(ids[stops[left] :])
    all_ends.append(ends[stops[left] :])
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


def _bytes_of_characters() -> dict[int, int]:
    """Return the byte for which each character of a byte-level vocabulary stands."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {256 + place: byte for place, byte in enumerate(others)}


BYTES = _bytes_of_characters()
"""Those of a byte-level vocabulary that stand for another byte than their own."""


def _spell_bytes(text: str) -> bytes:
    return text.translate(BYTES).encode("latin-1", "replace")


def _spell_text(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
