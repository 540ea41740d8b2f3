"""What batches are made of: memory that a device can fetch from, and labels that do not count."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.types import Batch

IGNORED = -100
"""The label of a token that is not trained."""


def heard(batch: Batch) -> Batch:
    """Return what a model is called with: no labels, and no `_name`, which is for a loss alone."""
    return {name: one for name, one in batch.items() if name != "labels" and name[0] != "_"}


def label(ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the trained ids where they are, and elsewhere what is ignored."""
    # By arithmetic, in place: a choice for each token, as in np.where, takes three times as long.
    labels = -mask.view(np.int8).astype(np.int32)
    labels &= ids - IGNORED
    labels += IGNORED
    return labels


def buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory to fill: pinned where there is a GPU, which then copies it by itself.

    torch keeps pinned memory for the next buffer once no copy from it is under way.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=_gpu())


@cache
def _gpu() -> bool:
    return torch.cuda.is_available()
