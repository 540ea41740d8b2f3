"""Which optimizers learn the same under ZeRO-3."""

import optimizers
import pytest
import torch
from torch import nn

from plugsft import PluginError
from plugsft.ranks.optimizer_checks import ELEMENTWISE, ensure_suits_zero3

NUMBERS = torch.linspace(-1, 1, 48)


def two_steps(make, numbers, shapes, at_once):
    """Update numbers twice, as weights of these shapes: all at once, or each as its own group."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    pieces = zip(numbers.split(sizes), shapes, strict=True)
    weights = [nn.Parameter(piece.clone().view(shape)) for piece, shape in pieces]
    groups = [weights] if at_once else [[weight] for weight in weights]
    optimizer = make([{"params": group} for group in groups])
    for step in range(2):
        for group in groups:
            optimizer.zero_grad()
            for weight in group:
                weight.grad = torch.sin(weight.detach() * (7 + step))
            optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


def learns_the_same(make):
    """Compare whole weights with two ranks' flat pieces of two groups, as ZeRO-3 makes them."""
    whole = two_steps(make, NUMBERS, [(4, 8), (16, 1)], at_once=True)
    ranks = [two_steps(make, half, [(16,), (8,)], at_once=False) for half in NUMBERS.chunk(2)]
    return torch.allclose(whole, torch.cat(ranks), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_torchs_optimizers_for_zero3_learn_the_same_there(kind):
    assert learns_the_same(lambda groups: kind(groups, lr=1e-2))
    ensure_suits_zero3(kind([nn.Parameter(NUMBERS)], lr=1e-2))


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, optimizers.ScheduleFree])
def test_others_learn_something_else(kind):
    assert not learns_the_same(lambda groups: kind(groups, lr=1e-2))


def test_an_optimizer_is_refused_under_zero3_unless_it_says_that_it_suits():
    class Mine(torch.optim.AdamW):
        pass

    weights = [nn.Parameter(NUMBERS)]
    for optimizer in (Mine(weights), torch.optim.Adafactor(weights)):
        with pytest.raises(PluginError, match="is not known to update each number on its own"):
            ensure_suits_zero3(optimizer)
        optimizer.elementwise = True
        ensure_suits_zero3(optimizer)
