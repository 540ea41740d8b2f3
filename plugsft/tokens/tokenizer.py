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
"""Texts to encode at a time: their bytes stay in the processor's cache, and the tokenizers library
returns about a hundred bytes per token."""

Ids = NDArray[np.int32]
NO_IDS, NO_ENDS = np.zeros(0, np.int32), np.zeros(0, np.int64)
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
        around = self.special_ids if special_tokens else (NO_IDS, NO_IDS)
        ids, counts, ends = [NO_IDS], [NO_ENDS], [NO_ENDS]
        start, again = 0, 0
        for first in range(0, len(texts), TEXTS):
            batch = texts[first : first + TEXTS]
            spelled = [text.encode() for text in batch]
            batch_ids, batch_counts = (engine or self.own_engine)(batch)
            batch_ends = self._find_all_ends(batch_ids, batch_counts, spelled)
            if batch_ends is None or any(map(len, around)):
                batch_ids, batch_counts, batch_ends, alone = self._encode_each(
                    batch, spelled, np.split(batch_ids, offsets_of(batch_counts)[1:-1]), around
                )
                again += alone
            ids.append(batch_ids)
            counts.append(batch_counts)
            ends.append(batch_ends + start)
            start += sum(map(len, spelled))
        engines = {name: len(texts) - again, OWN: again} if name != OWN else {OWN: len(texts)}
        all_ids = np.concatenate(ids).astype(np.int32, copy=False)
        return Encoded(all_ids, np.concatenate(counts), np.concatenate(ends), engines)

    def _encode_each(
        self, texts: list[str], spelled: list[bytes], found: list[Ids], around: tuple[Ids, Ids]
    ) -> tuple[Ids, Ints, Ints, int]:
        """Look at each text: its ids may not decode to it, and special tokens go around them.

        Gives ids, counts and ends, and how often the model's own tokenizer encoded a text again.
        """
        before, after = around
        ids, counts, ends = list[Ids](), list[int](), list[Ints]()
        start, again = 0, 0
        for text, text_bytes, text_ids in zip(texts, spelled, found, strict=True):
            text_ends = self._find_ends(text_ids, text_bytes)
            if text_ends is None:
                text_ids, text_ends = self._encode_alone(text, text_bytes)
                again += 1
            stop = start + len(text_bytes)
            ids += [before, text_ids, after]
            counts.append(len(before) + len(text_ids) + len(after))
            # Special tokens have no bytes: they end at the text's edges.
            ends += [np.full(len(before), start), text_ends + start, np.full(len(after), stop)]
            start = stop
        return np.concatenate(ids), np.array(counts), np.concatenate(ends), again

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
        encodings = self.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        counts = np.array([*map(len, ids)], np.int64)
        return np.concatenate([NO_IDS, *ids]), counts

    def _find_all_ends(self, ids: Ids, counts: Ints, texts: list[bytes]) -> "Ints | None":
        """Find where the tokens of several texts end, if each text's own decode to it."""
        ends = self._find_ends(ids, b"".join(texts))
        if ends is None:
            return None
        last_ends = np.append(0, ends)[offsets_of(counts)]
        return ends if np.array_equal(last_ends, offsets_of([*map(len, texts)])) else None

    def _find_ends(self, ids: Ids, text: bytes) -> "Ints | None":
        """Find the byte where each token ends, if the tokens decode to the text."""
        if not len(ids):
            return None if text else NO_ENDS
        try:
            # Not pa.array(): it imports pandas, which takes longer than most slices.
            buffers = [None, pa.py_buffer(np.ascontiguousarray(ids, np.int32))]
            tokens = self.token_bytes.take(pa.Array.from_buffers(pa.int32(), len(ids), buffers))
        except IndexError:
            return None
        _, offsets, spelled = tokens.buffers()
        ends = np.frombuffer(offsets, np.int32, len(ids) + 1)[1:].astype(np.int64)
        decoded = spelled.to_pybytes()[: ends[-1]] if spelled else b""
        if decoded == text:
            return ends
        # Some vocabularies put a space before every text.
        return np.maximum(ends - 1, 0) if decoded == b" " + text else None

    def _encode_alone(self, text: str, spelled: bytes) -> tuple[Ids, Ints]:
        """Encode a text with the model's own tokenizer; its offsets may have to tell the ends."""
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        ends = self._find_ends(ids, spelled)
        if ends is None:
            # A token that starts before the end of another (a character's bytes) ends with it.
            last = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 1]
            # The byte at which each character begins, and the end of the text.
            begins = np.flatnonzero((np.frombuffer(spelled, np.uint8) & 0xC0) != 0x80)
            ends = np.append(begins, len(spelled))[np.maximum.accumulate(last)]
        return ids, ends


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


OTHER_BYTES = [*range(33), *range(127, 161), 173]
"""Bytes that no character of their own code stands for in byte-level vocabularies."""
BYTES = {256 + place: byte for place, byte in enumerate(OTHER_BYTES)}
"""Characters that stand for another byte than their own code."""


def _bytes_of_characters(text: str) -> bytes:
    return text.translate(BYTES).encode("latin-1", "replace")


def _bytes_of_text(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
