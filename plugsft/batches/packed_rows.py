"""Several documents in one row that never see each other: their tensors and attention."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ..base.errors import RecipeError, TrainError
from ..base.types import Batch, Ints
from ..tokens.store import Tokens
from .labels import IGNORED, buffer, label

ATTENTION = "plugsft_documents"
"""The name of this attention in transformers."""


IGNORABLE = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "keys"}
"""Tensors that attention per document does not need: `documents` says the same."""


def pack(tokens: Tokens, examples: Ints, length: int | None = None) -> Batch:
    """Pack examples into one row, padded to a length if given."""
    counts, seen = tokens.sequences(examples)
    lengths, used = counts, int(counts.sum())
    # A rank without examples still takes part in every all-reduce.
    total = max(length or 0, used, 2)
    if total > used:
        # Padding is an untrained document.
        lengths, seen = np.append(counts, total - used), np.append(seen, 0)
    # One buffer for all: the allocator would return and fetch several small ones each time.
    ids, labels, positions = buffer((3, 1, total), torch.int64)
    flat, mask = tokens.gather(examples)
    # The first token of a document is not predicted from the document before.
    mask[np.cumsum(counts) - counts] = False
    for row, values, filler in ((ids, flat, 0), (labels, label(flat, mask), IGNORED)):
        row.numpy()[0, :used] = values
        row.numpy()[0, used:] = filler
    return {"input_ids": ids, "labels": labels, **documents_of(lengths, positions, seen)}


def documents_of(
    lengths: Ints, positions: Tensor | None = None, seen: "Ints | None" = None
) -> Batch:
    """Return the document boundaries of a row, for every kind of attention.

    A document may also attend to the first `seen` tokens of the document before it.
    """
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    if positions is None:
        positions = buffer((1, int(bounds[-1])), torch.int64)
    each = lengths.tolist()
    longest = max(each)
    ramp = np.arange(longest)
    if seen is not None and seen.any():
        return _branching(lengths, positions, seen)
    np.concatenate([ramp[:length] for length in each], out=positions.numpy()[0])
    return {
        "position_ids": positions,
        # The names that flash attention's kernels know in transformers.
        "cu_seq_lens_q": torch.from_numpy(bounds),
        "cu_seq_lens_k": torch.from_numpy(bounds),
        "max_length_q": longest,
        "max_length_k": longest,
        # On the host: a kernel that is called once for each must not ask the device how long.
        "documents": tuple(each),
    }


def _branching(lengths: Ints, positions: Tensor, seen: Ints) -> Batch:
    starts = np.cumsum(lengths) - lengths
    before = np.append(0, starts[:-1])
    wide = lengths + seen
    both = np.stack([before, starts], 1).ravel(), np.stack([seen, lengths], 1).ravel()
    keys = np.concatenate([np.arange(a, a + n) for a, n in zip(*both, strict=True)])
    parts = [np.arange(a, a + n) for a, n in zip(seen, lengths, strict=True)]
    np.concatenate(parts, out=positions.numpy()[0])
    found = documents_of(lengths) | {"position_ids": positions}
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
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each document of a row."""
    if s_aux is not None:
        raise RecipeError(
            "this model's attention has sinks, which attention per document cannot compute; "
            "remove [plugins.bfd_packing]"
        )
    # transformers makes no mask for this attention: one that comes is the model's own.
    given = {"attention_mask": attention_mask, **others}
    for name, extra in given.items():
        if isinstance(extra, Tensor) and name not in IGNORABLE:
            raise RecipeError(
                f"this model's attention is given '{name}', which attention per document cannot "
                "apply; remove [plugins.bfd_packing]"
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
    """Return a layer's attention chunk (Llama 4), which transformers puts only into its masks."""
    config: Any = getattr(module, "config", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if chunk is None or kinds is None or layer is None:
        return chunk
    return chunk if kinds[layer] == "chunked_attention" else None


def _branches(parts: Sequence[Tensor], seen: tuple[int, ...]) -> list[Tensor]:
    """Prepend the tokens of the document before that a document sees."""
    return [
        torch.cat([parts[number - 1][:, :, :most], part], 2) if most else part
        for number, (part, most) in enumerate(zip(parts, seen, strict=True))
    ]


def lone_document(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """Return the length of a row without boundaries: one document, or an error."""
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
