"""Gradients of a model, copied and compared."""


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
