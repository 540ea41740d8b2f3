"""Tools for plugins that train. It imports torch; `plugsft.data_kit` does not."""

from .batches.labels import buffer, make_labels, model_inputs, target_places
from .model import fused_head
from .model.answers import lay_out
from .model.defaults import decay_groups
from .model.for_plugins import decoder_layers, find_modules, meta_model
from .model.published import meta_copy
from .model.same_base import ensure_same_base
from .model.tensor_shards import num_weights, shard_of, whole_shape
from .ranks.artefacts import artefact
from .ranks.optimizer_checks import optimizers_in

__all__ = [
    "artefact",
    "buffer",
    "decay_groups",
    "decoder_layers",
    "ensure_same_base",
    "find_modules",
    "fused_head",
    "lay_out",
    "make_labels",
    "meta_copy",
    "meta_model",
    "model_inputs",
    "num_weights",
    "optimizers_in",
    "shard_of",
    "target_places",
    "whole_shape",
]
