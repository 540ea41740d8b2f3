"""Compares a kernel for packed rows with float32, on the device of the run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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
