"""Tools for plugins of batches, model and loss. Imports torch and transformers."""

from ..batches.labels import model_inputs
from ..batches.packed_rows import attend_per_document, documents_of, pack, single_document
from ..model.flops import Shapes, peak_flops, shapes_of
from ..model.for_plugins import decoder_layers, weights_digest
from ..model.fused_head import LogitTransform, Positions, fused_loss

__all__ = [
    "LogitTransform",
    "Positions",
    "Shapes",
    "attend_per_document",
    "decoder_layers",
    "documents_of",
    "fused_loss",
    "model_inputs",
    "pack",
    "peak_flops",
    "shapes_of",
    "single_document",
    "weights_digest",
]
