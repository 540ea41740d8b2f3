"""Several documents in one row that never see each other: their tensors and attention."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .batches import IGNORED, buffer, label
from .errors import RecipeError, TrainError
from .tokens import Tokens
from .types import Batch, Ints

ATTENTION = "plugsft_documents"
"""The name under which transformers finds the attention below."""


def pack(tokens: Tokens, examples: Ints, length: int | None = None) -> Batch:
    """Lay examples end to end in one row, filled up to a length if one is given."""
    counts, seen = tokens.sequences(examples)
    lengths, used = counts, int(counts.sum())
    # A rank without examples still takes part in every exchange of gradients.
    total = max(length or 0, used, 2)
    if total > used:
        # What fills a row is a document too, of which nothing is trained.
        lengths, seen = np.append(counts, total - used), np.append(seen, 0)
    # One piece of memory for all: the allocator gives back and fetches anew what comes in several.
    ids, labels, places = buffer((3, 1, total), torch.int64)
    flat, mask = tokens.gather(examples)
    # The end of a document does not foretell the beginning of the next.
    mask[np.cumsum(counts) - counts] = False
    for row, values, filler in ((ids, flat, 0), (labels, label(flat, mask), IGNORED)):
        row.numpy()[0, :used] = values
        row.numpy()[0, used:] = filler
    return {"input_ids": ids, "labels": labels, **documents_of(lengths, places, seen)}


def documents_of(lengths: Ints, places: Tensor | None = None, seen: "Ints | None" = None) -> Batch:
    """Say where the documents of a row stand, as every kind of attention wants to hear it.

    One may go on from the first tokens of the document before it, of which it sees so many.
    """
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    if places is None:
        places = buffer((1, int(bounds[-1])), torch.int64)
    each = lengths.tolist()
    longest = max(each)
    ramp = np.arange(longest)
    if seen is not None and seen.any():
        return _branching(lengths, places, seen)
    np.concatenate([ramp[:length] for length in each], out=places.numpy()[0])
    return {
        "position_ids": places,
        # The names that flash attention's kernels know in transformers.
        "cu_seq_lens_q": torch.from_numpy(bounds),
        "cu_seq_lens_k": torch.from_numpy(bounds),
        "max_length_q": longest,
        "max_length_k": longest,
        # On the host: a kernel that is called once for each must not ask the device how long.
        "documents": tuple(each),
    }


def _branching(lengths: Ints, places: Tensor, seen: Ints) -> Batch:
    starts = np.cumsum(lengths) - lengths
    before = np.append(0, starts[:-1])
    wide = lengths + seen
    both = np.stack([before, starts], 1).ravel(), np.stack([seen, lengths], 1).ravel()
    keys = np.concatenate([np.arange(a, a + n) for a, n in zip(*both, strict=True)])
    parts = [np.arange(a, a + n) for a, n in zip(seen, lengths, strict=True)]
    np.concatenate(parts, out=places.numpy()[0])
    found = documents_of(lengths) | {"position_ids": places}
    found["cu_seq_lens_k"] = documents_of(wide)["cu_seq_lens_q"]
    found["max_length_k"] = int(wide.max())
    return found | {"seen": tuple(seen.tolist()), "keys": torch.from_numpy(keys)}


def attend_per_document() -> str:
    """Register attention that is computed document by document; return its name."""
    AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


def attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: tuple[int, ...] | None = None,
    seen: tuple[int, ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each document of a row."""
    if s_aux is not None:
        raise RecipeError(
            "this model's attention has sinks, which attention per document cannot compute; "
            "remove [plugins.bfd_packing]"
        )
    if documents is None:
        documents = lone_document(query, key)
    chunk = chunk_of(module)
    # One operation: its gradient is put together at once, where slices' would be added up.
    queries, keys, values = (
        [*torch.split(tensor, list(documents), 2)] for tensor in (query, key, value)
    )
    if seen is not None:
        keys, values = (_branches(parts, seen) for parts in (keys, values))
    outputs = [
        _attend_one(q, k, v, scaling, dropout, Sight(sliding_window, chunk), softcap)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


class Sight(NamedTuple):
    """The limits of what a token attends to, in tokens."""

    window: int | None
    """The last tokens up to this one."""
    chunk: int | None
    """Tokens of the same chunk, counted from the document's first token."""

    def covers(self, length: int) -> bool:
        """Tell whether no limit is reached in a document of this length."""
        return all(limit is None or length <= limit for limit in self)

    def mask(self, length: int, wide: int, device: torch.device) -> Tensor:
        """Return which of `wide` keys each of the last `length` tokens attends to."""
        keys = torch.arange(wide, device=device)
        queries = keys[wide - length :, None]
        seen = keys <= queries
        if self.window is not None:
            seen &= keys > queries - self.window
        if self.chunk is not None:
            seen &= keys // self.chunk == queries // self.chunk
        return seen


def chunk_of(module: Module) -> int | None:
    """Return the chunk of a layer of attention (Llama 4): it lives in transformers' masks only."""
    config: Any = getattr(module, "config", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if chunk is None or kinds is None or layer is None:
        return chunk
    return chunk if kinds[layer] == "chunked_attention" else None


def _branches(parts: Sequence[Tensor], seen: tuple[int, ...]) -> list[Tensor]:
    """Put what a document sees of the one before it in front of its own."""
    return [
        torch.cat([parts[number - 1][:, :, :most], part], 2) if most else part
        for number, (part, most) in enumerate(zip(parts, seen, strict=True))
    ]


def lone_document(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """Return the length of a row of which nothing is said: it is one document, or a mistake."""
    if len(query) > 1 or query.shape[2] != key.shape[2]:
        raise TrainError(
            "a model that was loaded for packed rows was called with padded rows, or with a "
            "cache; call a copy of it that is loaded by transformers alone"
        )
    return (query.shape[2],)


def _attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    sight: Sight,
    softcap: float | None,
) -> Tensor:
    shared = query.shape[1] != key.shape[1]
    length, wide = query.shape[2], key.shape[2]
    if sight.covers(wide) and softcap is None and length == wide:
        return scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=shared
        )
    seen = sight.mask(length, wide, query.device)
    if softcap is None:
        return scaled_dot_product_attention(
            query, key, value, seen, dropout_p=dropout, scale=scaling, enable_gqa=shared
        )
    if shared:
        times = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(times, 1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[3] ** -0.5)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.dropout(weights, dropout, train=dropout > 0) @ value
