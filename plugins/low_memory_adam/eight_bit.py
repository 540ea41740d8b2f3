"""AdamW of bitsandbytes, with moments of 8 bits."""

import importlib.util
import warnings
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from plugsft import PluginError, RecipeError, Train
from plugsft.kit import decay_groups

PAGED = "paged_adamw_8bit"


def ensure_available(kind: str) -> None:
    """Refuse a kind whose package or GPU is missing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(f"kind = \"{kind}\" needs bitsandbytes: pip install 'plugsft[quantize]'")
    if kind == PAGED and not torch.cuda.is_available():
        raise RecipeError(f'kind = "{PAGED}" needs an NVIDIA GPU; set kind = "adamw_8bit"')


def make_eight_bit(kind: str, model: Module, train: Train) -> Optimizer:
    """Make the optimizer; refuse sharded weights."""
    groups = decay_groups(model, train.weight_decay)
    for group in groups:
        for weight in group["params"]:
            if hasattr(weight, "device_mesh") or hasattr(weight, "ds_id"):
                how = "FSDP2" if hasattr(weight, "device_mesh") else "ZeRO-3"
                raise PluginError(
                    f"plugins.low_memory_adam: kind: {kind} quantizes moments in blocks of a "
                    f"whole weight, and {how} divides weights otherwise. Launch with DDP "
                    '(recipes/accelerate/gpu8.yaml), or set kind = "corrected" under FSDP2'
                )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about packages that it does not find and does not need
        from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit

    make: Any = PagedAdamW8bit if kind == PAGED else AdamW8bit
    optimizer: Optimizer = make(
        groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.eps
    )
    return optimizer
