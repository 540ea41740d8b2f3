"""Texts far longer than any example: only their beginning is encoded, if that gives equal tokens.

Encoding a row of 50 MB, of which 512 tokens are used, takes minutes and gigabytes.
"""

from collections import Counter
from dataclasses import replace

from tokenizers import Encoding

from .tokenizer import Tokenizer
from .types import Rendered

FAR = 64
"""Characters for each token of the limit; a text with fewer is encoded whole."""
FIRST = 16
"""Characters for each token of the limit in the shortest beginning that is tried."""
GROWTH = 4
"""How many times as long the next beginning is."""


def shorten(rendered: Rendered, tokenizer: Tokenizer, limit: int) -> Rendered:
    """Cut texts whose first `limit` tokens, and that there are more, a beginning tells."""
    # An expression may take a text away from its beginning to its end.
    normalizer = tokenizer.backend_tokenizer.normalizer
    if normalizer is not None and "Regex" in repr(normalizer):
        return rendered
    far = [n for n, text in enumerate(rendered.texts) if len(text) > FAR * (limit + FAR)]
    if not far:
        return rendered
    texts, spans, pieces = list(rendered.texts), list(rendered.spans), Counter(rendered.rows)
    for number in far:
        # A pair of answers is compared from their first trained tokens on, wherever these are.
        starts = [start for start, _ in spans[number]] if pieces[rendered.rows[number]] > 1 else []
        size = _enough(texts[number], tokenizer, limit, max(starts, default=0))
        texts[number] = texts[number][:size]
        spans[number] = [(a, min(b, size)) for a, b in spans[number] if a < size]
    return replace(rendered, texts=texts, spans=spans)


def _enough(text: str, tokenizer: Tokenizer, limit: int, start: int) -> int:
    """Return the length of a beginning that is enough, or of the text."""
    size = FIRST * (limit + FAR)
    while GROWTH * size < len(text):
        if start < size and _settled(text[: 2 * size], size, tokenizer, limit):
            return size
        size *= GROWTH
    return len(text)


def _settled(text: str, size: int, tokenizer: Tokenizer, limit: int) -> bool:
    """Tell whether nothing behind a beginning of `size` characters can change its first tokens.

    Behind the first `limit` + 1 tokens there must be a border that no token crosses, and between
    it and the middle of the beginning characters of two kinds: spaces, digits or letters that
    begin before the border, and are split by how many of them there are, end before the middle.
    And a beginning twice as long must have the same tokens.
    """
    backend = tokenizer.backend_tokenizer
    encoded = backend.encode(text[:size], add_special_tokens=False)
    middle = size // 2
    border = _border(encoded, tokenizer, limit + 1, middle)
    if border is None:
        return False
    end = encoded.offsets[border - 1][1]
    if len({_kind(character) for character in text[end:middle]}) < 2:
        return False
    # By two lengths that differ by one: groups of digits may be counted from the right.
    longer = (backend.encode(text[: len(text) - n], add_special_tokens=False) for n in (0, 1))
    return all(encoded.ids[:border] == one.ids[:border] for one in longer)


def _border(encoded: Encoding, tokenizer: Tokenizer, first: int, middle: int) -> int | None:
    """Return the first token from `first` on that cannot have been joined with the one before."""
    words, tokens, offsets = encoded.word_ids, encoded.tokens, encoded.offsets
    for place in range(first, len(tokens)):
        if offsets[place][1] > middle:
            break
        if words[place] != words[place - 1] or tokenizer.never_joined(
            *tokens[place - 1 : place + 1]
        ):
            return place
    return None


def _kind(character: str) -> int:
    """Return what a character is, as the patterns that split texts have it."""
    kinds = (str.isspace, str.isnumeric, str.isalpha)
    return next((n for n, is_one in enumerate(kinds) if is_one(character)), len(kinds))
