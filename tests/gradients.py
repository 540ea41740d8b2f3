"""Gradients of a model, copied and compared; and a loss computed plainly."""

import torch
from torch.nn.functional import cross_entropy


def gradients(model):
    """Return copies of the gradients that a model has."""
    named = model.named_parameters()
    return {name: one.grad.clone() for name, one in named if one.requires_grad}


def assert_equal(found, expected):
    """Compare gradients; none is zero."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 0, name
        assert (found[name] - gradient).abs().max() <= 1e-5 * scale, name


def weighted_loss(model, tokens, examples):
    """Return the weighted loss of examples, one at a time, and the divisor, written out plainly."""
    loss, divisor = 0.0, 0.0
    for number in examples:
        weight = tokens.columns["weight"][number]
        ids, mask = map(torch.from_numpy, tokens.example(number))
        logits = model(ids[None].long()).logits[0, :-1]
        targets = ids[1:].long()[mask[1:]]
        loss = loss + weight * cross_entropy(logits[mask[1:]], targets, reduction="sum")
        divisor += weight * len(targets)
    return loss, divisor
