"""plugsft: LLM fine-tuning in one readable loop; every optimisation is a plugin."""

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
from .machine import Machine
from .recipe import Recipe
from .types import Encoded, Fed, Rendered, Shard, Slice, Window

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DataError",
    "Encoded",
    "Fed",
    "Hooks",
    "LaunchError",
    "Machine",
    "PluginError",
    "PlugsftError",
    "Recipe",
    "RecipeError",
    "Rendered",
    "Shard",
    "Slice",
    "TrainError",
    "Window",
    "__version__",
    "hookimpl",
    "plugin",
    "state",
]
