"""Packed rows as batches: several documents in one row."""

import numpy as np
import torch
from torch import Tensor

from plugsft import Batch, Ints
from plugsft.data_kit import Tokens
from plugsft.kit import buffer, make_labels

IGNORED = -100
"""Label of a token that is not trained."""


def documents_of(
    lengths: Ints, positions: Tensor | None = None, seen: "Ints | None" = None
) -> Batch:
    """Return position ids and boundaries of a row's documents, for every kind of attention.

    A document may also attend to the first `seen` tokens of the document before it.
    """
    if positions is None:
        positions = buffer((1, int(lengths.sum())), torch.int64)
    keys = lengths if seen is None else lengths + seen
    ramp = np.arange(keys.max())
    spans = zip((keys - lengths).tolist(), keys.tolist(), strict=True)
    np.concatenate([ramp[start:stop] for start, stop in spans], out=positions.numpy()[0])
    bounds, longest = _bounds_of(lengths), int(lengths.max())
    batch: Batch = {
        "position_ids": positions,
        # The names that transformers has for flash attention.
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        # On the host: a kernel call per document must not wait for the device.
        "documents": tuple(lengths.tolist()),
    }
    if seen is None or not seen.any():
        return batch
    starts = np.cumsum(lengths) - lengths
    previous = np.append(0, starts[:-1])
    # The places of the keys of each document: its prompt in the document before, and its own.
    parts = np.stack([previous, starts], 1).ravel(), np.stack([seen, lengths], 1).ravel()
    places = [np.arange(first, first + count) for first, count in zip(*parts, strict=True)]
    return batch | {
        "cu_seq_lens_k": _bounds_of(keys),
        "max_length_k": int(keys.max()),
        "seen": tuple(seen.tolist()),
        "keys": torch.from_numpy(np.concatenate(places)),
    }


def _bounds_of(lengths: Ints) -> Tensor:
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return torch.from_numpy(bounds)


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
