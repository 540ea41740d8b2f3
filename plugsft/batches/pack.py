"""Pack examples into one row, for plugins and forecasts; the core packs nothing."""

import numpy as np
import torch

from ..base.types import Batch, Ints
from ..tokens.store import Tokens
from .labels import IGNORED, buffer, make_labels
from .packed_rows import documents_of


def pack(tokens: Tokens, examples: Ints, length: int | None = None) -> Batch:
    """Pack examples into one row, padded to `length`. Default: no padding."""
    counts, seen = tokens.sequences(examples)
    lengths, num_tokens = counts, int(counts.sum())
    # A rank without examples still takes part in every all-reduce.
    total = max(length or 0, num_tokens, 2)
    if total > num_tokens:
        # Padding is an untrained document.
        lengths, seen = np.append(counts, total - num_tokens), np.append(seen, 0)
    # One buffer for all: the allocator would free and allocate several small ones each time.
    input_ids, labels, positions = buffer((3, 1, total), torch.int64)
    ids, mask = tokens.gather(examples)
    # The first token of a document is not predicted from the document before.
    mask[np.cumsum(counts) - counts] = False
    for row, values, padding in ((input_ids, ids, 0), (labels, make_labels(ids, mask), IGNORED)):
        row.numpy()[0, :num_tokens] = values
        row.numpy()[0, num_tokens:] = padding
    return {"input_ids": input_ids, "labels": labels, **documents_of(lengths, positions, seen)}
