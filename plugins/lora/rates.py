"""Learning rates of the two halves of adapters (LoRA+)."""

from torch.nn import Module
from torch.optim import Optimizer

from plugsft.kit import optimizers_in

SECOND = ("lora_B.", "lora_embedding_B.")
"""Parts of the names of the second halves."""


def scale_second_halves(optimizer: Optimizer, model: Module, ratio: float) -> None:
    """Give the second halves of adapters groups of their own, with `ratio` times the rate.

    The first group stays first: its learning rate is the logged one.
    """
    named = model.named_parameters()
    second = {weight for name, weight in named if any(part in name for part in SECOND)}
    optimizers = optimizers_in(optimizer)
    for group in [*optimizer.param_groups]:
        scaled = [weight for weight in group["params"] if weight in second]
        rest = [weight for weight in group["params"] if weight not in second]
        if not scaled:
            continue
        if not rest:
            group["lr"] *= ratio
            continue
        added = {**group, "params": scaled, "lr": group["lr"] * ratio}
        # An optimizer inside another one shares its groups.
        for each in optimizers:
            if any(other is group for other in each.param_groups):
                each.param_groups.append(added)
        group["params"] = rest
