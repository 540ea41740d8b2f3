"""Chains: turns of the assistant that continue each other are one example.

A chat template may write an earlier turn otherwise once others follow. Then the turns of a chat are
not one text. But those of one question, say, mostly are: the prompt of each begins with the turn
before, word for word. As one text they cost their tokens once.
"""

import re
from collections.abc import Iterable
from zlib import crc32

from tokenizers import AddedToken

from ..base.types import Span
from ..tokens.tokenizer import Tokenizer
from .formats import Parts

COMPARED = 256
"""Of this many chains, one is also encoded turn by turn, and both results are compared."""


def join(turns: list[Parts], text: str) -> Parts | None:
    """Make one example of all turns; None if a prompt does not begin with the turn before."""
    parts, end = Parts(), ""
    for prompt, answer in turns:
        if not prompt.startswith(end):
            return None
        parts += (prompt[len(end) :], answer)
        end = prompt + answer
    # The template may write no stop token behind the last trained turn.
    rest = [text[len(end) :]] if text.startswith(end) else []
    return parts + rest


def find_seams(ends: Iterable[str], added: list[AddedToken]) -> tuple[str, ...]:
    """Find those of some ends that are tokens wherever they stand, and whatever follows.

    The tokenizer takes such a token out before it looks at words. So all before it is encoded as if
    nothing followed.
    """
    whole = {token.content for token in added if not (token.normalized or token.single_word)}
    texts = "\0".join(token.content for token in added)
    return tuple(
        end for end in ends if end in whole and not re.search(re.escape(end) + "[^\0]", texts)
    )


def make_chains(turns: list[Parts], seams: tuple[str, ...]) -> list[Parts]:
    """Join the turns that continue each other, where one of the seams ends the earlier one."""
    chains, texts = list[Parts](), list[str]()
    for prompt, answer in turns:
        begun = [n for n, text in enumerate(texts) if text and prompt.startswith(text)]
        if begun:
            longest = max(begun, key=lambda n: len(texts[n]))
        else:
            longest = len(chains)
            chains.append(Parts())
            texts.append("")
        chains[longest] += (prompt[len(texts[longest]) :], answer)
        whole = prompt + answer
        texts[longest] = whole if whole.endswith(seams) else ""
    return chains


def ensure_same_ids(text: str, answers: list[Span], tokenizer: Tokenizer) -> None:
    """Compare some chains with their turns: each turn alone must have the ids that it has there."""
    if len(answers) < 2 or crc32(text.encode()) % COMPARED:
        return
    encode = tokenizer.backend_tokenizer.encode
    ids = encode(text, add_special_tokens=False).ids
    for _, stop in answers:
        alone = encode(text[:stop], add_special_tokens=False).ids
        if ids[: len(alone)] != alone:
            raise AssertionError(
                "the tokenizer writes an answer otherwise where a turn follows, though it ends "
                "with a token of its own; please report it, with the tokenizer"
            )
