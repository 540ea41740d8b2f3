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
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    if positions is None:
        positions = buffer((1, int(bounds[-1])), torch.int64)
    documents = lengths.tolist()
    longest = max(documents)
    if seen is not None and seen.any():
        return _documents_with_shared_prompts(lengths, positions, seen)
    ramp = np.arange(longest)
    np.concatenate([ramp[:length] for length in documents], out=positions.numpy()[0])
    return {
        "position_ids": positions,
        # The names that transformers has for flash attention.
        "cu_seq_lens_q": torch.from_numpy(bounds),
        "cu_seq_lens_k": torch.from_numpy(bounds),
        "max_length_q": longest,
        "max_length_k": longest,
        # On the host: a kernel call per document must not wait for the device.
        "documents": tuple(documents),
    }


def _documents_with_shared_prompts(lengths: Ints, positions: Tensor, seen: Ints) -> Batch:
    starts = np.cumsum(lengths) - lengths
    previous = np.append(0, starts[:-1])
    key_lengths = lengths + seen
    spans = np.stack([previous, starts], 1).ravel(), np.stack([seen, lengths], 1).ravel()
    keys = np.concatenate([np.arange(a, a + n) for a, n in zip(*spans, strict=True)])
    ramps = [np.arange(a, a + n) for a, n in zip(seen, lengths, strict=True)]
    np.concatenate(ramps, out=positions.numpy()[0])
    batch = documents_of(lengths) | {"position_ids": positions}
    batch["cu_seq_lens_k"] = documents_of(key_lengths)["cu_seq_lens_q"]
    batch["max_length_k"] = int(key_lengths.max())
    return batch | {"seen": tuple(seen.tolist()), "keys": torch.from_numpy(keys)}


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
