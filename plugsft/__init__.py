"""plugsft: LLM fine-tuning in one readable loop; every optimisation is a plugin.

Light: it imports no numpy and no torch. `plugsft.kit` and `plugsft.data_kit` have the heavier tools
for plugins, `plugsft.api` the functions for scripts and notebooks.
"""

from .base.atomic import damage, write_text
from .base.checksums import cache_folder, digest
from .base.console import progress, say
from .base.errors import (
    DataError,
    DiskError,
    PluginError,
    RecipeError,
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
from .hooks import ModelLoad, Ranks, Run, RunModel, ShardWriter, hookimpl, plugin, state
from .model.answer_loss import AnswerLoss
from .recipe.capabilities import Capability
from .recipe.tables import Data, Folder, Place, Recipe, Train

__version__ = "0.2.0.dev0"

__all__ = [
    "AnswerLoss",
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
    "Ranks",
    "Recipe",
    "RecipeError",
    "Rendered",
    "Run",
    "RunModel",
    "Shard",
    "ShardWriter",
    "Slice",
    "TokenNll",
    "Train",
    "WeightSlice",
    "cache_folder",
    "child_environment",
    "damage",
    "digest",
    "hookimpl",
    "not_installed",
    "plugin",
    "progress",
    "reason_of",
    "say",
    "state",
    "write_text",
]
