"""What batches are made of: memory that a device can fetch from, and labels that do not count."""

from functools import cache

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that is not trained."""


def buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory to fill: pinned where there is a GPU, which then copies it by itself.

    torch keeps pinned memory for the next buffer once no copy from it is under way.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=_gpu())


@cache
def _gpu() -> bool:
    return torch.cuda.is_available()
