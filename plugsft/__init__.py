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

__version__ = "0.1.0"

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
    "Train",
    "TrainError",
    "Window",
    "Work",
    "__version__",
    "hookimpl",
    "plugin",
    "state",
]
