"""plugsft for scripts and notebooks: the commands as functions, and what they raise.

The functions call what the commands call, and raise what the commands print. A run changes settings
of the whole process: one at a time is allowed, and environment and signal handlers are restored
after it. Several ranks are started as `plugsft launch` starts them.
"""

from ..base.errors import PlugsftError, Stopped, TrainError
from .functions import generate, inspect, load_run, prepare, train

__all__ = [
    "PlugsftError",
    "Stopped",
    "TrainError",
    "generate",
    "inspect",
    "load_run",
    "prepare",
    "train",
]
