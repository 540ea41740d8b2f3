"""plugsft: LLM fine-tuning in one readable loop; every optimisation is a plugin.

Light: it imports no numpy and no torch. `plugsft.kit.tokens` and `plugsft.kit.model` do.
"""

from .base.atomic import damage
from .base.build_once import once
from .base.checksums import cache_folder, digest
from .base.console import progress, say
from .base.errors import (
    CheckpointError,
    DataError,
    DiskError,
    LaunchError,
    PluginError,
    PlugsftError,
    RecipeError,
    TrainError,
    did_you_mean,
    reason_of,
)
from .base.machine import Machine, look
from .base.types import (
    Batch,
    Build,
    CacheEntry,
    Encoded,
    Ints,
    Layout,
    Layouts,
    LoadedStep,
    LoadedSteps,
    ModelLoad,
    OnDemand,
    Rendered,
    Row,
    Shard,
    Slice,
    StepPlan,
    TokenNll,
    WeightSlice,
    Work,
)
from .hooks import Hooks, Ranks, Run, RunModel, Status, hookimpl, plugin, state
from .recipe.capabilities import Capability, bundled_plugin
from .recipe.tables import Data, Folder, Place, Recipe, Train

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Build",
    "CacheEntry",
    "Capability",
    "CheckpointError",
    "Data",
    "DataError",
    "DiskError",
    "Encoded",
    "Folder",
    "Hooks",
    "Ints",
    "LaunchError",
    "Layout",
    "Layouts",
    "LoadedStep",
    "LoadedSteps",
    "Machine",
    "ModelLoad",
    "OnDemand",
    "Place",
    "PluginError",
    "PlugsftError",
    "Ranks",
    "Recipe",
    "RecipeError",
    "Rendered",
    "Row",
    "Run",
    "RunModel",
    "Shard",
    "Slice",
    "Status",
    "StepPlan",
    "TokenNll",
    "Train",
    "TrainError",
    "WeightSlice",
    "Work",
    "__version__",
    "bundled_plugin",
    "cache_folder",
    "damage",
    "did_you_mean",
    "digest",
    "hookimpl",
    "look",
    "once",
    "plugin",
    "progress",
    "reason_of",
    "say",
    "state",
]
