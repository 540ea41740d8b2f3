"""The tokenizer of the data path, and the core's answer to `encode`. Needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers
from numpy.typing import NDArray

from ..base.types import Encoded, Ints
from .shards import offsets_of

OWN = "transformers"
"""The name of the model's own tokenizer among the engines."""
TEXTS = 256
"""Texts to encode at a time: the library returns about a hundred bytes per token."""


Ids = NDArray[np.int32]
Engine = Callable[[list[str]], tuple[Ids, Ints]]
"""Texts -> flat ids without special tokens, and the number of ids of each text."""


@dataclass
class Tokenizer:
    """A tokenizer that travels to other processes; its fields are named as in transformers."""

    backend_tokenizer: tokenizers.Tokenizer
    chat_template: str | None = None
    special_tokens_map: dict[str, str] | None = None
    """Names such as eos_token -> text."""
    honours_blocks: bool = False
    """Whether generation blocks of `chat_template` say what is trained: the recipe names it."""
    more_stops: tuple[str, ...] = ()
    """The tokens that end an answer, besides eos_token."""
    day: str = ""
    """The day that a template with a date writes: 2026-11-25."""

    def __getstate__(self) -> dict[str, Any]:
        # Cached properties stay behind.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    @property
    def eos_token(self) -> str:
        """The end-of-text token, or an empty string."""
        return (self.special_tokens_map or {}).get("eos_token", "")

    @property
    def stops(self) -> list[str]:
        """The tokens that end an answer."""
        return [*dict.fromkeys(filter(None, (self.eos_token, *self.more_stops)))]

    def encode_texts(
        self,
        texts: list[str],
        special_tokens: bool,
        engine: Engine | None = None,
        name: str = OWN,
    ) -> Encoded:
        """Encode with an engine (default: its own), and find the byte where each token ends.

        If the tokens of a text decode to it byte for byte, their lengths give the ends. Otherwise
        the model's own tokenizer encodes the text. If its tokens do not decode to the text either
        (the normalizer changed it, or the vocabulary hides the bytes), its offsets give the ends.
        """
        ids, counts = (engine or self.own_engine)(texts)
        ends, mismatches = _find_ends(ids, counts, texts, self)
        if mismatches:
            ids, counts, ends = _encode_again(ids, counts, ends, texts, mismatches, self)
        if special_tokens and any(map(len, self.special_ids)):
            ids, counts, ends = _add_special_tokens(ids, counts, ends, *self.special_ids)
        engines = {name: len(texts)}
        if name != OWN:
            engines = {name: len(texts) - len(mismatches), OWN: len(mismatches)}
        return Encoded(ids, counts, ends, engines)

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What its users keep from one call to the next."""
        return {}

    @cached_property
    def json(self) -> str:
        """The text of its tokenizer.json."""
        return str(self.backend_tokenizer.to_str())

    @cached_property
    def token_bytes(self) -> pa.Array:
        """The bytes that each id decodes to, as far as the vocabulary tells them."""
        backend = self.backend_tokenizer
        parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
        byte_level = any("ByteLevel" in repr(part) for part in parts)
        to_bytes = _bytes_of_characters if byte_level else _bytes_of_text
        # Others write an added token as their decoder does: Gemma's "▁▁" stands for two spaces.
        added = backend.get_added_tokens_decoder() if byte_level else {}
        vocab = backend.get_vocab()
        decoded = [b""] * (max(vocab.values(), default=-1) + 1)
        for text, number in vocab.items():
            decoded[number] = text.encode() if number in added else to_bytes(text)
        offsets = offsets_of([len(token) for token in decoded]).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(decoded))]
        return pa.Array.from_buffers(pa.binary(), len(decoded), buffers)

    @cached_property
    def special_ids(self) -> tuple[Ids, Ids]:
        """The special tokens that the tokenizer adds before and after a text."""
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
            encodings = self.backend_tokenizer.encode_batch_fast(
                texts[first : first + TEXTS], add_special_tokens=False
            )
            ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
            counts += [len(encoding) for encoding in encodings]
        return np.concatenate(ids), np.array(counts, np.int64)


def lighten(tokenizer: Any) -> Tokenizer:
    """Reduce a tokenizer of transformers to the parts that the data path needs."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return Tokenizer(tokenizer.backend_tokenizer, template, names)


def num_bytes(text: str, start: int, stop: int) -> int:
    """Return the number of bytes of a span of a text."""
    # Most texts are ASCII, where every character is one byte.
    return stop - start if text.isascii() else len(text[start:stop].encode())


def _sizes(texts: list[str]) -> Ints:
    return np.array([num_bytes(text, 0, len(text)) for text in texts], np.int64)


def _find_ends(
    ids: Ids, counts: Ints, texts: list[str], tokenizer: Tokenizer
) -> tuple[Ints, list[int]]:
    """Return the byte where each token ends, and the texts that their tokens do not decode to."""
    sizes, offsets = _sizes(texts), offsets_of(counts)
    starts = offsets_of(sizes)
    ends, mismatches = np.empty(len(ids), np.int64), []
    # A few texts at a time: their bytes stay in the processor's cache.
    for first in range(0, len(texts), TEXTS):
        batch = slice(first, first + TEXTS)
        tokens = slice(offsets[first], offsets[min(first + TEXTS, len(texts))])
        batch_ends, wrong = _find_ends_of_batch(
            ids[tokens], counts[batch], texts[batch], sizes[batch], tokenizer
        )
        np.add(batch_ends, starts[first], out=ends[tokens])
        mismatches += [first + number for number in wrong]
    return ends, mismatches


def _find_ends_of_batch(
    ids: Ids, counts: Ints, texts: list[str], sizes: Ints, tokenizer: Tokenizer
) -> tuple[NDArray[Any], list[int]]:
    try:
        # Not pa.array(): it imports pandas, which takes longer than most slices.
        buffers = [None, pa.py_buffer(np.ascontiguousarray(ids, np.int32))]
        tokens = tokenizer.token_bytes.take(pa.Array.from_buffers(pa.int32(), len(ids), buffers))
    except IndexError:
        return np.zeros(len(ids), np.int32), list(range(len(texts)))
    _, token_offsets, decoded = tokens.buffers() if len(ids) else (None, bytes(4), None)
    decoded = decoded or pa.py_buffer(b"")
    ends = np.frombuffer(token_offsets, np.int32, len(ids) + 1)
    decoded_offsets, text_offsets = ends[offsets_of(counts)], offsets_of(sizes)
    ends = ends[1:]
    if np.array_equal(decoded_offsets, text_offsets) and decoded.slice(0, text_offsets[-1]).equals(
        pa.py_buffer("".join(texts).encode())
    ):
        return ends, []
    spaces, mismatches = np.zeros(len(texts), np.int64), []
    for number, text in enumerate(texts):
        start, stop = decoded_offsets[number : number + 2]
        from_tokens, from_text = decoded.slice(start, stop - start).to_pybytes(), text.encode()
        if from_tokens == b" " + from_text:
            # Some vocabularies put a space before every text.
            spaces[number] = 1
        elif from_tokens != from_text:
            mismatches.append(number)
    ends = ends - np.repeat(decoded_offsets[:-1] + spaces - text_offsets[:-1], counts)
    return np.maximum(ends, np.repeat(text_offsets[:-1], counts)), mismatches


def _encode_again(
    ids: Ids, counts: Ints, ends: Ints, texts: list[str], numbers: list[int], tokenizer: Tokenizer
) -> tuple[Ids, Ints, Ints]:
    """Replace the tokens of some texts by those of the model's own tokenizer."""
    sizes = _sizes(texts)
    starts, borders = offsets_of(sizes), offsets_of(counts)[1:-1]
    all_ids, all_ends = np.split(ids, borders), np.split(ends, borders)
    for number in numbers:
        text = texts[number]
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        new_ids = np.array(encoding.ids, np.int32)
        new_ends, mismatches = _find_ends_of_batch(
            new_ids, np.array([len(new_ids)]), [text], sizes[[number]], tokenizer
        )
        if mismatches:
            # A token that starts before the end of another (a character's bytes) ends with it.
            last = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 1]
            new_ends = _character_offsets(text)[np.maximum.accumulate(last)]
        all_ids[number], all_ends[number] = new_ids, new_ends + starts[number]
    counts = np.array([len(one) for one in all_ids], np.int64)
    return np.concatenate(all_ids), counts, np.concatenate(all_ends)


def _character_offsets(text: str) -> Ints:
    """Return the byte at which each character begins, and the end of the text."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    return np.append(np.flatnonzero((encoded & 0xC0) != 0x80), len(encoded))


def _add_special_tokens(
    ids: Ids, counts: Ints, ends: Ints, before: Ids, after: Ids
) -> tuple[Ids, Ints, Ints]:
    """Add the tokenizer's special tokens to each text; they have no bytes."""
    offsets = offsets_of(counts)
    borders = np.stack([offsets[:-1], offsets[1:]], 1)
    # In the order of the texts: an end token stays before the next text's first token.
    indices = np.repeat(borders, [len(before), len(after)], 1).ravel()
    added = np.tile(np.concatenate([before, after]), len(counts))
    # A special token ends where the token before it ends.
    added_ends = np.concatenate([[0], ends])[indices]
    return (
        np.insert(ids, indices, added),
        counts + len(before) + len(after),
        np.insert(ends, indices, added_ends),
    )


def _byte_level_characters() -> dict[int, int]:
    """Return characters of byte-level vocabularies -> the byte that each stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {256 + place: byte for place, byte in enumerate(others)}


BYTES = _byte_level_characters()
"""Characters that stand for another byte than their own code."""


def _bytes_of_characters(text: str) -> bytes:
    return text.translate(BYTES).encode("latin-1", "replace")


def _bytes_of_text(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
