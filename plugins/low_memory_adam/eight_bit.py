"""AdamW of bitsandbytes, with moments of 8 bits."""

from typing import Any

from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit
from torch.nn import Module
from torch.optim import Optimizer

from plugsft import PluginError, Train
from plugsft.kit import decay_groups


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
