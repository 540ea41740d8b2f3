"""The largest packed row whose gradients a kernel can index."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from plugsft import RecipeError

from .kernels import head_widths

INDEXED_BY_32_BITS = ("fa2", "torch")
"""Kernels that index the sums of the queries' gradients by 32 bits, at least in older releases."""
ROOM = 128
"""Tokens for which those sums have room between two documents."""


def sums_of_token(kernel: str, config: PretrainedConfig) -> int:
    """Return how many sums a token's gradient takes; 0 if a kernel can index any number."""
    if kernel not in INDEXED_BY_32_BITS:
        return 0
    widest = max(head_widths(config))
    step = 32 if widest <= 128 else 64
    heads: int = config.num_attention_heads
    return heads * -(-widest // step) * step


def ensure_indexable(batch: Mapping[str, Any], sums: int, option: str) -> None:
    """Refuse a row that would end in wrong gradients, or in an illegal memory access."""
    bounds = batch.get("cu_seq_lens_q")
    if bounds is None:
        return
    documents, tokens = len(bounds) - 1, batch["input_ids"].numel()
    if (tokens + ROOM * documents) * sums >= 2**31:
        raise RecipeError(
            "plugins.flash_attention: the kernel cannot index the gradients of a packed row of "
            f"{tokens:,} tokens in {documents:,} documents: (tokens + {ROOM} x documents) x "
            f"{sums:,}, which is heads x width, must be below 2**31; lower {option}, or set "
            'plugins.flash_attention.kernel = "sdpa"'
        )
