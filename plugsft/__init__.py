"""plugsft: LLM fine-tuning in one readable loop; every optimisation is a plugin."""

import importlib
from typing import TYPE_CHECKING, Any

from .base.errors import (
    CheckpointError,
    DataError,
    DiskError,
    LaunchError,
    PluginError,
    PlugsftError,
    RecipeError,
    TrainError,
)
from .base.machine import Machine, look
from .base.types import (
    Batch,
    Build,
    Encoded,
    Fed,
    Feed,
    Ints,
    Kept,
    Layout,
    Layouts,
    ModelLoad,
    OnDemand,
    Rendered,
    Row,
    Score,
    Shard,
    Slice,
    Window,
    Work,
)
from .hooks import Hooks, Prelude, hookimpl, plugin, state
from .recipe.tables import Data, Folder, Place, Recipe, Train

if TYPE_CHECKING:
    from .base.atomic import damage
    from .base.build_once import once
    from .base.checksums import cache_folder, digest
    from .base.console import progress, say
    from .batches.labels import heard
    from .batches.packed_rows import attend_per_document, documents_of, lone_document, pack
    from .data.defaults import opened, tokenizing
    from .data.pairs import render_pairs
    from .data.render import render_rows
    from .model.document_probe import ensure_apart, ensure_twin_apart, takes_documents
    from .model.flops import Shapes, peak_flops, shapes_of
    from .model.fused_head import Behind, Positions, fused_loss
    from .model.load import decoder_layers, weights_digest
    from .output.bottlenecks import Measured, bottlenecks
    from .tokens.store import Tokens
    from .tokens.tokenizer import Tokenizer, encode

__version__ = "0.1.0"

LATE = {
    "Behind": "model.fused_head",
    "Measured": "output.bottlenecks",
    "Positions": "model.fused_head",
    "Shapes": "model.flops",
    "Tokenizer": "tokens.tokenizer",
    "Tokens": "tokens.store",
    "attend_per_document": "batches.packed_rows",
    "bottlenecks": "output.bottlenecks",
    "cache_folder": "base.checksums",
    "damage": "base.atomic",
    "decoder_layers": "model.load",
    "digest": "base.checksums",
    "documents_of": "batches.packed_rows",
    "encode": "tokens.tokenizer",
    "ensure_apart": "model.document_probe",
    "ensure_twin_apart": "model.document_probe",
    "fused_loss": "model.fused_head",
    "heard": "batches.labels",
    "lone_document": "batches.packed_rows",
    "once": "base.build_once",
    "opened": "data.defaults",
    "pack": "batches.packed_rows",
    "peak_flops": "model.flops",
    "progress": "base.console",
    "render_pairs": "data.pairs",
    "render_rows": "data.render",
    "say": "base.console",
    "shapes_of": "model.flops",
    "takes_documents": "model.document_probe",
    "tokenizing": "data.defaults",
    "weights_digest": "model.load",
}
"""Names whose modules bring numpy, Arrow or torch: imported when a plugin asks for them."""


def __getattr__(name: str) -> Any:
    if name in LATE:
        return getattr(importlib.import_module(f".{LATE[name]}", __name__), name)
    raise AttributeError(f"module 'plugsft' has no attribute '{name}'")


__all__ = [
    "Batch",
    "Behind",
    "Build",
    "CheckpointError",
    "Data",
    "DataError",
    "DiskError",
    "Encoded",
    "Fed",
    "Feed",
    "Folder",
    "Hooks",
    "Ints",
    "Kept",
    "LaunchError",
    "Layout",
    "Layouts",
    "Machine",
    "Measured",
    "ModelLoad",
    "OnDemand",
    "Place",
    "PluginError",
    "PlugsftError",
    "Positions",
    "Prelude",
    "Recipe",
    "RecipeError",
    "Rendered",
    "Row",
    "Score",
    "Shapes",
    "Shard",
    "Slice",
    "Tokenizer",
    "Tokens",
    "Train",
    "TrainError",
    "Window",
    "Work",
    "__version__",
    "attend_per_document",
    "bottlenecks",
    "cache_folder",
    "damage",
    "decoder_layers",
    "digest",
    "documents_of",
    "encode",
    "ensure_apart",
    "ensure_twin_apart",
    "fused_loss",
    "heard",
    "hookimpl",
    "lone_document",
    "look",
    "once",
    "opened",
    "pack",
    "peak_flops",
    "plugin",
    "progress",
    "render_pairs",
    "render_rows",
    "say",
    "shapes_of",
    "state",
    "takes_documents",
    "tokenizing",
    "weights_digest",
]
