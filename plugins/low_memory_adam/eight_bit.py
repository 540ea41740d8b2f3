"""AdamW of bitsandbytes, with moments of 8 bits."""

from typing import Any

import torch
from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit
from torch.nn import Module
from torch.optim import Optimizer

from plugsft import PluginError, RecipeError, Train
from plugsft.kit import decay_groups


def ensure_gpu(kind: str) -> None:
    """Refuse a kind that needs a GPU, where there is none."""
    if not torch.cuda.is_available():
        raise RecipeError(f'kind: "{kind}" needs an NVIDIA GPU; set kind = "adamw_8bit"')


def make_eight_bit(model: Module, train: Train, paged: bool) -> Optimizer:
    """Make the optimizer; refuse sharded weights."""
    groups = decay_groups(model, train.weight_decay)
    for group in groups:
        for weight in group["params"]:
            if hasattr(weight, "device_mesh") or hasattr(weight, "ds_id"):
                how = "FSDP2" if hasattr(weight, "device_mesh") else "ZeRO-3"
                raise PluginError(
                    "plugins.low_memory_adam: kind: bitsandbytes quantizes moments in blocks of a "
                    f"whole weight, and {how} divides weights otherwise. Launch with DDP "
                    '(recipes/accelerate/gpu8.yaml), or set kind = "corrected" under FSDP2'
                )
    make: Any = PagedAdamW8bit if paged else AdamW8bit
    optimizer: Optimizer = make(
        groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.eps
    )
    return optimizer
