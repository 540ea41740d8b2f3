"""plugsft: LLM fine-tuning in one readable loop; every optimisation is a plugin.

Light: it imports no numpy and no torch. `plugsft.kit` has the heavier tools for plugins.
"""

from .api.functions import generate, inspect, load_run, prepare, train
from .base.atomic import damage, write_text
from .base.build_once import once
from .base.checksums import cache_folder, digest
from .base.console import progress, say
from .base.errors import (
    DataError,
    DiskError,
    PluginError,
    PlugsftError,
    RecipeError,
    Stopped,
    TrainError,
    reason_of,
)
from .base.machine import Machine, child_environment, not_installed
from .base.types import (
    Batch,
    Encoded,
    Ints,
    Layouts,
    LoadedStep,
    Rendered,
    Shard,
    Slice,
    TokenNll,
    WeightSlice,
)
from .hooks import ModelLoad, Ranks, Run, RunModel, Work, hookimpl, plugin, state
from .recipe.capabilities import Capability
from .recipe.tables import Data, Folder, Place, Recipe, Train

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Capability",
    "Data",
    "DataError",
    "DiskError",
    "Encoded",
    "Folder",
    "Ints",
    "Layouts",
    "LoadedStep",
    "Machine",
    "ModelLoad",
    "Place",
    "PluginError",
    "PlugsftError",
    "Ranks",
    "Recipe",
    "RecipeError",
    "Rendered",
    "Run",
    "RunModel",
    "Shard",
    "Slice",
    "Stopped",
    "TokenNll",
    "Train",
    "TrainError",
    "WeightSlice",
    "Work",
    "cache_folder",
    "child_environment",
    "damage",
    "digest",
    "generate",
    "hookimpl",
    "inspect",
    "load_run",
    "not_installed",
    "once",
    "plugin",
    "prepare",
    "progress",
    "reason_of",
    "say",
    "state",
    "train",
    "write_text",
]
