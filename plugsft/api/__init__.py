"""plugsft for scripts and notebooks: the commands as functions, and what they raise."""

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
