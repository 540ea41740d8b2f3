"""plugsft: LLM fine-tuning in one readable loop; every optimisation is a plugin."""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    CheckpointError,
    DataError,
    DiskError,
    LaunchError,
    PluginError,
    PlugsftError,
    RecipeError,
    TrainError,
)
from .hooks import Hooks, hookimpl, plugin, state
from .machine import Machine, look
from .recipe import Data, Recipe, Train
from .types import (
    Batch,
    Build,
    Encoded,
    Fed,
    Feed,
    Ints,
    Layout,
    Layouts,
    ModelLoad,
    OnDemand,
    Rendered,
    Row,
    Shard,
    Slice,
    Window,
    Work,
)

if TYPE_CHECKING:
    from .answers import open_tokens, tokenizing
    from .claims import once
    from .console import say
    from .digests import cache_folder, digest
    from .documents import attend_per_document, documents_of, ensure_apart, lone_document, pack
    from .models import decoder_layers
    from .publish import damage
    from .tokenizer import Tokenizer, encode
    from .tokens import Tokens

__version__ = "0.1.0"

LATE = {
    "Tokenizer": "tokenizer",
    "Tokens": "tokens",
    "attend_per_document": "documents",
    "cache_folder": "digests",
    "damage": "publish",
    "decoder_layers": "models",
    "digest": "digests",
    "documents_of": "documents",
    "encode": "tokenizer",
    "ensure_apart": "documents",
    "lone_document": "documents",
    "once": "claims",
    "open_tokens": "answers",
    "pack": "documents",
    "say": "console",
    "tokenizing": "answers",
}
"""Names whose modules bring numpy, Arrow or torch: imported when a plugin asks for them."""


def __getattr__(name: str) -> Any:
    if name in LATE:
        return getattr(importlib.import_module(f".{LATE[name]}", __name__), name)
    raise AttributeError(f"module 'plugsft' has no attribute '{name}'")


__all__ = [
    "Batch",
    "Build",
    "CheckpointError",
    "Data",
    "DataError",
    "DiskError",
    "Encoded",
    "Fed",
    "Feed",
    "Hooks",
    "Ints",
    "LaunchError",
    "Layout",
    "Layouts",
    "Machine",
    "ModelLoad",
    "OnDemand",
    "PluginError",
    "PlugsftError",
    "Recipe",
    "RecipeError",
    "Rendered",
    "Row",
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
    "cache_folder",
    "damage",
    "decoder_layers",
    "digest",
    "documents_of",
    "encode",
    "ensure_apart",
    "hookimpl",
    "lone_document",
    "look",
    "once",
    "open_tokens",
    "pack",
    "plugin",
    "say",
    "state",
    "tokenizing",
]
