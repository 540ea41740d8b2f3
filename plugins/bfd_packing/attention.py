"""Attention that is computed document by document, registered in transformers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from plugsft import PluginError, RecipeError

ATTENTION = "plugsft_documents"
"""Name of this attention in transformers."""
IGNORABLE = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "keys"}
"""Tensors that attention per document does not need: `documents` has the same information."""


def attend_per_document(compiled: bool = False) -> str:
    """Register attention that is computed document by document; return its name.

    In a model of compiled layers it is left out: its loop differs for each number of documents.
    """
    whole = torch.compiler.disable(attend) if compiled else attend  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION, whole)
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
    """Attend within each document of a row. `s_aux`: the scores of sinks, one a head."""
    # transformers makes no mask for this attention: any mask comes from the model's own code.
    for name, argument in {"attention_mask": attention_mask, **others}.items():
        if isinstance(argument, Tensor) and name not in IGNORABLE:
            raise RecipeError(
                f"this model's attention is given '{name}', which attention per document cannot "
                "apply; remove the plugin that packs rows"
            )
    if documents is None:
        documents = single_document(query, key)
    limits = Limits(sliding_window, chunk_size(module))
    # torch.split has one backward for all documents; slices would add up full-size gradients.
    queries, keys, values = (
        [*torch.split(tensor, list(documents), 2)] for tensor in (query, key, value)
    )
    if seen is not None:
        keys, values = (_prepend_prompts(tensors, seen) for tensors in (keys, values))
    outputs = [
        _attend_document(q, k, v, scaling, dropout, limits, softcap, s_aux)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


class Limits(NamedTuple):
    """Limits of the keys that a token attends to."""

    window: int | None
    """Number of tokens up to this one."""
    chunk: int | None
    """Length of a chunk; chunks are counted from the document's first token."""

    def mask(self, length: int, num_keys: int, device: torch.device) -> Tensor:
        """Return which of `num_keys` keys each of the last `length` tokens attends to."""
        keys = torch.arange(num_keys, device=device)
        queries = keys[num_keys - length :, None]
        mask = keys <= queries
        if self.window is not None:
            mask &= keys > queries - self.window
        if self.chunk is not None:
            mask &= keys // self.chunk == queries // self.chunk
        return mask


def chunk_size(module: Module) -> int | None:
    """Return the attention chunk of a layer (Llama 4), which transformers applies in masks only."""
    config: Any = getattr(module, "config", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    return chunk if not kinds or kinds[module.layer_idx] == "chunked_attention" else None


def _prepend_prompts(documents: Sequence[Tensor], seen: tuple[int, ...]) -> list[Tensor]:
    """Prepend the first `seen` tokens of the document before to each document."""
    return [
        torch.cat([documents[number - 1][:, :, :count], document], 2) if count else document
        for number, (document, count) in enumerate(zip(documents, seen, strict=True))
    ]


def single_document(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """Return the length of a row without boundaries, which must be one document."""
    if len(query) > 1 or query.shape[2] != key.shape[2]:
        raise PluginError(
            "a model that was loaded for packed rows was called with padded rows or with a "
            "key-value cache; call a copy of it that transformers alone has loaded"
        )
    return (query.shape[2],)


def _attend_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    limits: Limits,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    length, num_keys = query.shape[2], key.shape[2]
    unlimited = all(limit is None or num_keys <= limit for limit in limits)
    causal = unlimited and softcap is None and sinks is None and length == num_keys
    mask = None if causal else limits.mask(length, num_keys, query.device)
    if sinks is not None and mask is not None:
        key, value, mask = _with_sinks(key, value, mask, sinks.to(query.dtype))
    if softcap is None or mask is None:
        return scaled_dot_product_attention(
            query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=grouped
        )
    if grouped:
        group = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[3] ** -0.5)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.dropout(weights, dropout, train=dropout > 0) @ value


def _with_sinks(key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
    """Add the sink: a key that every token sees, with a score of its own, and no value.

    The key is zeros, so its score is what the mask adds to it.
    """
    scores = torch.zeros_like(mask, dtype=sinks.dtype).masked_fill(~mask, float("-inf"))
    shape = (1, len(sinks), len(mask), 1)
    columns = [scores.expand(*shape[:3], -1), sinks.view(1, -1, 1, 1).expand(shape)]
    key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
    return key, value, torch.cat(columns, 3)
