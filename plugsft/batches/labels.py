"""Labels and pinned buffers of batches."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ..base.types import Batch

IGNORED = -100
"""Label of a token that is not trained."""


def model_inputs(batch: Batch) -> Batch:
    """Return the model's inputs: not the labels, and no `_name`, which is for the loss alone."""
    return {name: value for name, value in batch.items() if name != "labels" and name[0] != "_"}


def target_places(batch: Batch) -> Tensor:
    """Return the places in the flattened labels after which a token is trained.

    The loop's batches bring them from the host. If a plugin has replaced the labels, or for other
    batches, the device counts them, and the host waits for it.
    """
    labels: Tensor = batch["labels"]
    if batch.get("_places_of") is labels:
        return batch["_places"]  # type: ignore[no-any-return]
    return pad(labels[:, 1:] != IGNORED, (0, 1)).flatten().nonzero().squeeze(1)


def make_labels(ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the ids of trained tokens, and IGNORED for the others."""
    # All bits of a trained place are 1, and those of another 0, which becomes IGNORED. Arithmetic
    # in place: np.where takes three times as long.
    labels = -mask.view(np.int8).astype(np.int32)
    labels &= ids - IGNORED
    labels += IGNORED
    return labels


def buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor, pinned if there is a GPU, so that copies to it are asynchronous.

    torch reuses pinned memory after the last copy from it.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=_has_gpu())


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()
