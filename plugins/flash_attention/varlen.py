"""Attention within the documents of a packed row, by torch's own kernel, and its proof."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from plugsft import PluginError, RecipeError

Kernel = Callable[..., Any]


def fastest_kernel(device: str) -> Kernel:
    """Return torch's kernel, called without Python in either pass where that is exact."""
    return by_operator if operator_is_exact(device) else varlen_kernel()


@cache
def operator_is_exact(device: str) -> bool:
    """Tell whether torch's operator has a derivative, and the results of float32."""
    try:
        return largest_error(by_operator, device) <= TOLERANCE
    except Exception:  # whatever it lacks, varlen_attn takes its place
        return False


def by_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> Any:
    """Call the operator that varlen_attn wraps; its derivative is part of torch's C++."""
    no_dropout, no_debugging = 0.0, False
    return torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        no_dropout,
        window_size == (-1, 0),
        no_debugging,
        scale=scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
    )[0]


def varlen_kernel() -> Kernel:
    """Return varlen_attn for grouped heads: torch 2.12 added `enable_gqa`; 2.11 needs none."""
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return partial(varlen_attn, enable_gqa=True)
    return varlen_attn


def attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kernel: Kernel | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    keys: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each document of a row, in one launch and without waiting for the device.

    transformers makes no mask, since it does not know this attention's name.
    """
    if dropout or softcap is not None or s_aux is not None:
        raise RecipeError(
            'plugins.flash_attention: kernel = "torch" has no dropout, no soft cap and no sinks, '
            'and the model\'s attention has; set kernel = "sdpa"'
        )
    inputs = kernel_inputs(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    if keys is not None:
        # A shared prompt is copied before each document that attends to it.
        inputs |= {name: inputs[name].index_select(0, keys) for name in ("key", "value")}
        inputs |= {"cu_seq_k": cu_seq_lens_k, "max_k": max_length_k}
    return (kernel or fastest_kernel(query.device.type))(**inputs)[None], None


def kernel_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor | None,
    longest: int | None,
    scaling: float | None,
    window: int | None,
) -> dict[str, Any]:
    """Return the arguments of torch's kernel for a row in the layout of transformers."""
    if bounds is None or longest is None:
        longest = query.shape[2]
        if len(query) > 1 or key.shape[2] != longest:
            raise PluginError(
                "a model that was loaded for packed rows was called with padded rows or with a "
                "key-value cache; call a copy of it that transformers alone has loaded"
            )
        bounds = torch.arange(2, dtype=torch.int32, device=query.device) * longest
    dtype = query.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        # Norms of queries and keys return float32 if their weights are float32.
        dtype = torch.get_autocast_dtype(query.device.type)
    flat = [heads.transpose(1, 2).flatten(0, 1).to(dtype) for heads in (query, key, value)]
    return {
        **dict(zip(("query", "key", "value"), flat, strict=True)),
        "cu_seq_q": bounds,
        "cu_seq_k": bounds,
        "max_q": longest,
        "max_k": longest,
        "scale": scaling,
        # Left: a window counts the token itself. Right: 0, so attention is causal.
        "window_size": (-1 if window is None else window - 1, 0),
    }


LENGTHS = (5, 70, 1, 52)
WINDOW = 16
"""Shorter than some documents, longer than others."""
HEADS, KV_HEADS, WIDTH = 4, 2, 64
TOLERANCE = 2e-2
"""bfloat16 rounds a number by 1/256 at most; a sum adds up several such errors."""


def largest_error(kernel: Callable[..., Any], device: str) -> float:
    """Return the largest error of outputs and gradients, relative to the largest number."""
    generator = torch.Generator(device).manual_seed(0)
    tokens, lengths = sum(LENGTHS), torch.tensor(LENGTHS, device=device)
    query, key, value, grad = (
        torch.randn(tokens, heads, WIDTH, generator=generator, device=device).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    layout = (bounds, bounds, max(LENGTHS), max(LENGTHS))
    errors = []
    for window in (-1, WINDOW):
        options = {"scale": WIDTH**-0.5, "window_size": (window, 0)}
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
        output = kernel(*inputs, *layout, **options)
        results = output, *torch.autograd.grad(output, inputs, grad)
        inputs = [tensor.detach().float().requires_grad_() for tensor in inputs]
        output = attend_with_mask(inputs, lengths, window)
        expected = output.detach(), *torch.autograd.grad(output, inputs, grad.float())
        errors += [
            (result.detach().float() - exact).abs().max() / exact.abs().max()
            for result, exact in zip(results, expected, strict=True)
        ]
    return float(torch.stack(errors).max())


def attend_with_mask(inputs: list[Tensor], lengths: Tensor, window: int) -> Tensor:
    """Attend causally within each document, by a mask over the whole row."""
    documents = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    places = torch.arange(len(documents), device=lengths.device)
    back = places[:, None] - places
    seen = (documents[:, None] == documents) & (back >= 0)
    if window >= 0:
        seen &= back <= window
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in inputs)
    output = scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    return output[0].transpose(0, 1)
