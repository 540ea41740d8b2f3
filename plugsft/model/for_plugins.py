"""Functions on models that plugins use, and the loop does not."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import GradientCheckpointingLayer

from ..base.checksums import cached_file_digest, digest
from ..base.errors import RecipeError
from .tensor_shards import whole_shape
from .weight_files import find_weight_files


def decoder_layers(model: Any, that: str) -> list[Any]:
    """Return a model's layers; `that` ends the error if none: their use and the cure."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise RecipeError(f"a model of type '{model.config.model_type}' has no layers that {that}")
    return layers


def decay_groups(model: Module, weight_decay: float | None) -> list[dict[str, Any]]:
    """Return the parameter groups of all trained weights; norms and biases are not decayed.

    None: the optimizer has no weight decay.
    """
    decayed: list[Tensor] = []
    exempt: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            matrix = len(whole_shape(parameter)) > 1
            (decayed if matrix else exempt).append(parameter)
    if weight_decay is None:
        return [{"params": decayed + exempt}]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def weights_digest(path: str, revision: str | None) -> str:
    """Return a checksum of a pretrained model's weights, cached while its files are unchanged."""
    files = find_weight_files(path, revision)
    if not files:
        raise RecipeError(f"{path}: it has no weights in safetensors; save them in that format")
    return digest({Path(file).name: cached_file_digest(Path(file)) for file in files})
