"""Several documents in one row that never see each other: their tensors, attention and proof."""

from collections.abc import Sequence
from typing import Any

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
PROBE = (7, 9, 5)
"""Tokens of the documents that a model is probed with; the first is changed."""
LEAK = 1e-3
"""What may move in a document whose neighbour is changed, as a share of what moves in that one."""
ALONE = 0.05
"""What a document in company may differ from the same one alone, as such a share."""


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
    # One operation: its gradient is put together at once, where slices' would be added up.
    queries, keys, values = (
        [*torch.split(tensor, list(documents), 2)] for tensor in (query, key, value)
    )
    if seen is not None:
        keys, values = (_branches(parts, seen) for parts in (keys, values))
    outputs = [
        _attend_one(q, k, v, scaling, dropout, sliding_window, softcap)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


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
    window: int | None,
    softcap: float | None,
) -> Tensor:
    shared = query.shape[1] != key.shape[1]
    length, wide = query.shape[2], key.shape[2]
    near = window is not None and wide > window
    if not near and softcap is None and length == wide:
        return scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=shared
        )
    # What is seen of another document stands before its own.
    seen = torch.ones(length, wide, dtype=torch.bool, device=query.device).tril(wide - length)
    if near and window is not None:
        seen = seen.triu(wide - length + 1 - window)
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


@torch.no_grad()
def ensure_apart(model: Module, vocabulary: int) -> str:
    """Change one document of a packed row, and make sure that the others' logits stay.

    On the run's own model, kernel and dtype, on all ranks together; say what was found.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        rng = np.random.default_rng(0)
        texts = [rng.integers(0, vocabulary, length) for length in PROBE]
        other = (texts[0] + 1) % vocabulary
        base = _logits(model, texts, device)
        moved = (_logits(model, [other, *texts[1:]], device) - base).abs()
        alone = (_logits(model, texts[-1:], device) - base[-PROBE[-1] :]).abs()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise RecipeError(f"{_REFUSED}: it cannot take them: {error}") from error
    finally:
        model.train(training)
    change = float(moved[: PROBE[0]].max())
    if not change > 0:
        raise RecipeError(
            f"{_REFUSED}: its logits stay where its words change, or are no numbers, so that "
            "nothing can be proved"
        )
    leak, strange = float(moved[PROBE[0] :].max()) / change, float(alone.max()) / change
    if not leak <= LEAK:
        raise RecipeError(
            f"{_REFUSED}: where one document changes, the logits of others move by {leak:.1%} of "
            "its own. Its layers carry a state from token to token (linear attention, a state "
            "space, a convolution), or its attention cannot part documents"
        )
    if not strange <= ALONE:
        raise RecipeError(
            f"{_REFUSED}: a document behind others has other logits than alone (by {strange:.1%} "
            "of what a change of its words makes): its places are not counted anew"
        )
    moves = f"moves its neighbours by {leak:.0e} of its own" if leak else "moves no neighbour"
    return f"documents proved apart (a change {moves})"


_REFUSED = "this model cannot be trained on packed rows; remove [plugins.bfd_packing]"


def _logits(model: Module, texts: list[Ints], device: torch.device) -> Tensor:
    batch = {
        "input_ids": torch.from_numpy(np.concatenate(texts))[None],
        **documents_of(np.array([len(text) for text in texts])),
    }
    there = {
        name: one.to(device) if isinstance(one, Tensor) else one for name, one in batch.items()
    }
    logits: Tensor = model(**there, use_cache=False).logits[0]
    return logits.float()
