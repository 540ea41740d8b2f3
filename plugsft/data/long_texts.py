"""Encode only the beginning of a very long text, if that gives the same tokens.

Encoding a row of 50 million characters takes minutes and much memory, even if only its first 512
tokens are used.
"""

from collections import Counter
from dataclasses import replace

from tokenizers import Encoding

from ..base.types import Rendered
from ..tokens.tokenizer import Tokenizer

LONG = 64
"""Characters per token of the limit; shorter texts are encoded whole."""
FIRST_TRY = 16
"""Characters per token of the limit in the first beginning that is tried."""
GROWTH = 4
"""Factor between the lengths of two tries."""


def shorten(rendered: Rendered, tokenizer: Tokenizer, limit: int) -> Rendered:
    """Cut very long texts where a beginning gives the same first `limit` tokens, and one more."""
    long = [n for n, text in enumerate(rendered.texts) if len(text) > LONG * (limit + LONG)]
    # A regular expression in the normalizer may delete from the beginning to the end of a text.
    if not long or "Regex" in repr(tokenizer.backend_tokenizer.normalizer):
        return rendered
    texts, spans, counts = list(rendered.texts), list(rendered.spans), Counter(rendered.rows)
    for number in long:
        # Two answers of a pair are compared from their first trained tokens on.
        starts = [start for start, _ in spans[number]] if counts[rendered.rows[number]] > 1 else []
        size = _sufficient_size(texts[number], tokenizer, limit, max(starts, default=0))
        texts[number] = texts[number][:size]
        spans[number] = [(a, min(b, size)) for a, b in spans[number] if a < size]
    return replace(rendered, texts=texts, spans=spans)


def _sufficient_size(text: str, tokenizer: Tokenizer, limit: int, start: int) -> int:
    """Return the length of a sufficient beginning, or of the whole text."""
    size = FIRST_TRY * (limit + LONG)
    while GROWTH * size < len(text):
        if start < size and _is_stable(text[: 2 * size], size, tokenizer, limit):
            return size
        size *= GROWTH
    return len(text)


def _is_stable(text: str, size: int, tokenizer: Tokenizer, limit: int) -> bool:
    """Tell whether text after the first `size` characters cannot change the first tokens.

    There must be a border that no token crosses after the first `limit` + 1 tokens. Between the
    border and the middle of the beginning there must be characters of two kinds, so that a run of
    spaces, digits or letters ends there: some patterns split a run by its length. And a beginning
    twice as long must have the same tokens.
    """
    backend = tokenizer.backend_tokenizer
    encoded = backend.encode(text[:size], add_special_tokens=False)
    middle = size // 2
    border = _find_border(encoded, tokenizer, limit + 1, middle)
    if border is None:
        return False
    end = encoded.offsets[border - 1][1]
    if len({_kind(character) for character in text[end:middle]}) < 2:
        return False
    # Two lengths that differ by one: some patterns group digits from the right.
    longer = (backend.encode(part, add_special_tokens=False) for part in (text, text[:-1]))
    return all(encoded.ids[:border] == other.ids[:border] for other in longer)


def _find_border(encoded: Encoding, tokenizer: Tokenizer, first: int, middle: int) -> int | None:
    """Return the first token, from `first` on, that cannot be joined to the one before."""
    words, tokens, offsets = encoded.word_ids, encoded.tokens, encoded.offsets
    for place in range(first, len(tokens)):
        if offsets[place][1] > middle:
            break
        if words[place] != words[place - 1] or tokenizer.cannot_merge(
            *tokens[place - 1 : place + 1]
        ):
            return place
    return None


def _kind(character: str) -> int:
    """Return the class of a character: space, number, letter or other."""
    kinds = (str.isspace, str.isnumeric, str.isalpha)
    return next((n for n, is_one in enumerate(kinds) if is_one(character)), len(kinds))
