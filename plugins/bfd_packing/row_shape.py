"""One shape for all packed rows of an epoch, whatever documents they hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from plugsft import Batch


class RowShape(NamedTuple):
    """The shape of an epoch's rows: a compiled program for it serves every row."""

    documents: int
    """Most documents in a row."""
    longest: int
    """Most tokens in a document."""

    def join(self, other: RowShape) -> RowShape:
        """Return the shape that the rows of both fit."""
        return RowShape(*map(max, self, other))


def fix_shape(batch: Batch, tokens: int, shape: RowShape) -> Batch:
    """Give a row of `tokens` tokens and padding the boundaries of `shape.documents` documents.

    Padding is cut into documents of at most the longest, and then come empty ones, which the
    kernels for packed rows skip.
    """
    if "keys" in batch:  # shared prompts: the number of keys differs in each row
        return batch
    bounds = batch["cu_seq_lens_q"].numpy()
    total, bounds = bounds[-1], bounds[bounds <= tokens]
    longest = max(shape.longest, int(np.diff(bounds).max(initial=0)))
    missing = max(1 + shape.documents - len(bounds), -(-(total - tokens) // longest))
    rest = np.minimum(tokens + longest * np.arange(1, missing + 1), total)
    fixed = torch.from_numpy(np.append(bounds, rest).astype(np.int32))
    return {
        **batch,
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), fixed),
        **dict.fromkeys(("max_length_q", "max_length_k"), longest),
    }
