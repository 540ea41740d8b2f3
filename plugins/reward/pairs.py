"""Rows and tokens of pairs of answers. Imports no torch."""

from typing import Any

import numpy as np

from plugsft import Data, Ints, RecipeError, Rendered
from plugsft.data_kit import Tokenizer, Tokens, render_pairs

MARGIN = "margin"
LARGEST = 1_000_000
"""Largest margin, in either direction; scores are far smaller."""
TESTED = 64
"""Most pairs whose last tokens are compared with the pad token."""


def render_pairs_with_margins(
    rows: list[dict[str, Any]], tokenizer: Tokenizer, data: Data
) -> Rendered:
    """Render each row as two texts, and read by how much their scores should differ."""
    rendered = render_pairs(rows, tokenizer, data)
    column = data.columns.get(MARGIN, MARGIN)
    margins = [0.0] * len(rows)
    for number, row in enumerate(rows):
        margin = 0.0 if row.get(column) is None else row[column]
        if type(margin) in (int, float) and abs(margin) <= LARGEST:
            margins[number] = float(margin)
        else:
            reason = f"'{column}' is {repr(margin)[:20]}, and should be a number of at most"
            rendered.bad.setdefault(number, f"{reason} {LARGEST:,} for [plugins.reward]")
    rendered.columns[MARGIN] = margins
    rendered.read = {*(rendered.read or ()), MARGIN}
    return rendered


def last_tokens(tokens: Tokens) -> Ints:
    """Return the last token of both answers of some pairs."""
    examples = np.unique(np.linspace(0, len(tokens) - 1, TESTED).astype(np.int64))
    lengths, _ = tokens.sequences(examples)
    return tokens.gather(examples)[0][np.cumsum(lengths) - 1].astype(np.int64)


def ensure_not_padding(tokenizer: Any, config: Any, ends: Ints) -> str:
    """Refuse a pad token that ends answers; say if there is no pad token.

    transformers would score the token before it.
    """
    pad = config.pad_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if pad is None:
        return "no pad token, so transformers scores one answer at a time"
    if (ends == pad).any():
        token = tokenizer.convert_ids_to_tokens(int(pad))
        raise RecipeError(
            f"plugins.reward: answers end with {token}, which also pads rows. transformers scores "
            "the last token that is not padding, so the saved model would score another token "
            "than the trained one. Give a copy of the tokenizer another pad token (tokenizer."
            'pad_token = "..." and save_pretrained), and name its folder in model.tokenizer'
        )
    return ""
