"""plugsft: LLM fine-tuning in one readable loop; every optimisation is a plugin."""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    CheckpointError,
    DataError,
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
    Rendered,
    Row,
    Shard,
    Slice,
    Window,
    Work,
)

if TYPE_CHECKING:
    from .answers import tokenizing
    from .tokenizer import Tokenizer, encode
    from .tokens import Tokens

__version__ = "0.1.0"

LATE = {
    "Tokenizer": "tokenizer",
    "Tokens": "tokens",
    "encode": "tokenizer",
    "tokenizing": "answers",
}
"""Names whose modules bring numpy and Arrow: imported when a plugin asks for them."""


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
    "encode",
    "hookimpl",
    "look",
    "plugin",
    "state",
    "tokenizing",
]
