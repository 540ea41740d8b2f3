"""AdamW of bitsandbytes, with moments of 8 bits."""

from typing import Any

import torch
from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit
from torch.nn import Module
from torch.optim import Optimizer

from plugsft import RecipeError, Train
from plugsft.kit import decay_groups


def ensure_gpu(kind: str) -> None:
    """Refuse a kind that needs a GPU, where there is none."""
    if not torch.cuda.is_available():
        raise RecipeError(f'kind: "{kind}" needs an NVIDIA GPU; set kind = "adamw_8bit"')


def make_eight_bit(model: Module, train: Train, paged: bool) -> Optimizer:
    """Make the optimizer."""
    make: Any = PagedAdamW8bit if paged else AdamW8bit
    groups, betas = decay_groups(model, train.weight_decay), (train.beta1, train.beta2)
    optimizer: Optimizer = make(groups, lr=train.learning_rate, betas=betas, eps=train.eps)
    return optimizer
