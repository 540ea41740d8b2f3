"""Models with adapters, as a run loads them, and adapters that say something."""

import pytest
import torch

from plugsft.model.load import Load
from plugsft.plugins.lora import Lora


def adapt(folder, dtype=torch.float32, empty=False, load=None, **options):
    """Load a model as a run does."""
    plugin, load = Lora(**options), load or Load(str(folder), {"dtype": dtype}, empty)
    plugin.dtype = str(dtype).removeprefix("torch.")
    wrapper = plugin.optimize_model(load)
    next(wrapper)
    with pytest.raises(StopIteration) as ended:
        wrapper.send(load.build())
    return ended.value.value, plugin


def shake(*models):
    """Move what is trained, in all models alike, so that adapters say something."""
    named = [dict(model.named_parameters()) for model in models]
    torch.manual_seed(3)
    with torch.no_grad():
        for name, one in named[0].items():
            if one.requires_grad:
                new = one + (torch.randn(one.shape) * 0.05).to(one.device)
                for others in named:
                    others[name].copy_(new)
