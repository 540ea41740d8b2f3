"""Tools for plugins of batches, model and loss. Imports torch and transformers."""

from ..batches.labels import model_inputs
from ..batches.packed_rows import attend_per_document, documents_of, lone_document, pack
from ..model.document_probe import ensure_apart, ensure_twin_apart, takes_documents
from ..model.flops import Shapes, peak_flops, shapes_of
from ..model.fused_head import Behind, Positions, fused_loss
from ..model.load import decoder_layers, weights_digest

__all__ = [
    "Behind",
    "Positions",
    "Shapes",
    "attend_per_document",
    "decoder_layers",
    "documents_of",
    "ensure_apart",
    "ensure_twin_apart",
    "fused_loss",
    "lone_document",
    "model_inputs",
    "pack",
    "peak_flops",
    "shapes_of",
    "takes_documents",
    "weights_digest",
]
