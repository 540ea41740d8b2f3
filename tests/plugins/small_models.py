"""Small models that plugins change, as in a run: with adapters that say something, too."""

import pytest
import torch
from families import SMALL
from transformers import AutoModelForCausalLM, LlamaConfig

from plugsft.model.load import ModelLoad
from plugsft.plugins.lora import Lora

SIX_LAYERS = SMALL | {"intermediate_size": 64, "num_hidden_layers": 6, "attention_dropout": 0.1}
IDS = torch.randint(90, (2, 24), generator=torch.Generator().manual_seed(1))


def apply(model, plugin, *load):
    """Give a model to a plugin, as a run would."""
    steps = plugin.optimize_model(*load)
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(model)
    return end.value.value


def save_base(folder, config=None, dtype=torch.float32, tied=False):
    """Save a small model of a configuration, or a Llama; return its folder."""
    torch.manual_seed(0)
    config = config or LlamaConfig(**SMALL, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return folder


def adapt(folder, dtype=torch.float32, empty=False, load=None, **options):
    """Load a model as a run does."""
    plugin, load = Lora(**options), load or ModelLoad(str(folder), {"dtype": dtype}, empty)
    plugin.dtype = str(dtype).removeprefix("torch.")
    return apply(load.load_model(), plugin, load), plugin


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


def loss_and_gradients(model):
    """Return the loss of IDS, and the gradient of all that is trained."""
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return loss.detach(), torch.cat([one.grad.flatten() for one in trained]).float()
