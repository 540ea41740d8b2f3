"""Which optimizers learn the same under ZeRO-3."""

import optimizers
import pytest
import schedulefree
import torch
from torch import nn

from plugsft import PluginError
from plugsft.ranks.sharding import ensure_suits_zero3


class NormalizedSGD(torch.optim.Optimizer):
    """Divides each gradient by its norm, whatever its shape."""

    def __init__(self, weights, lr=1e-3):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad / weight.grad.norm(), alpha=group["lr"])


class SumInGroup(torch.optim.Optimizer):
    """Scales updates by the sum of all gradients so far, as Prodigy does with its `d`."""

    def __init__(self, weights, lr=1e-3):
        super().__init__(weights, {"lr": lr, "total": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            grads = [weight.grad for weight in group["params"] if weight.grad is not None]
            group["total"] += sum(float(grad.abs().sum()) for grad in grads)
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=group["lr"] * group["total"])


class WithDestructor(torch.optim.Adafactor):
    """Frees something at its end, so it is not copied."""

    freed = 0

    def __del__(self):
        type(self).freed += 1


def make_schedule_free(model):
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-3)
    optimizer.train()
    return optimizer


MAKERS = {
    **optimizers.ALL,
    "AdamWScheduleFree": make_schedule_free,
    "NormalizedSGD": lambda model: NormalizedSGD(model.parameters()),
    "SumInGroup": lambda model: SumInGroup(model.parameters()),
    "WithDestructor": lambda model: WithDestructor(model.parameters()),
}
REFUSED = {
    "AdamWScheduleFree": "has an evaluation mode, and between steps ZeRO-3 leaves",
    **dict.fromkeys(("Adafactor", "Muon", "NormalizedSGD"), "would learn something else"),
    **dict.fromkeys(("Combined", "Odd", "SumInGroup"), "would learn something else"),
}
COUNTS = ("ScheduleFree", "One group")
"""Optimizers that count their calls: refused if ZeRO-3 calls them for several groups."""


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_that_learns_something_else_under_zero3_is_refused(name):
    layers = [nn.Linear(4, 4, bias=False)]
    model = nn.Sequential(*layers, *([] if name == "Muon" else [nn.LayerNorm(4)]))
    weights = [weight.detach().clone() for weight in model.parameters()]
    optimizer, random = MAKERS[name](model), torch.get_rng_state()
    before, freed = str(optimizer.state_dict()), WithDestructor.freed
    for flat_tensors in (1, 2):
        expected = REFUSED.get(name)
        if flat_tensors == 2 and name in COUNTS:
            expected = "ScheduleFree would learn something else"
        if expected:
            with pytest.raises(PluginError) as refused:
                ensure_suits_zero3(optimizer, model, flat_tensors)
            said = str(refused.value)
            assert expected in said and "Launch with DDP or FSDP2" in said
        else:
            ensure_suits_zero3(optimizer, model, flat_tensors)
    assert before == str(optimizer.state_dict())
    assert all(map(torch.equal, weights, model.parameters()))
    assert torch.equal(random, torch.get_rng_state()) and WithDestructor.freed == freed
