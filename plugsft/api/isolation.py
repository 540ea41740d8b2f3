"""Run in this process, from accelerate's state of a new one; leave environment and signals alone.

Random numbers, torch's settings and what libraries print stay as the run set them.
"""

import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from ..ranks.agree import host_group
from ..ranks.failures import Watch, watch
from ..ranks.stopping import Stopping
from .messages import alone

_one_run = threading.Lock()
_cuda: Any = torch.cuda  # partly untyped


@contextmanager
def isolated() -> Iterator[None]:
    """Train or generate in a block; restore environment, signal handlers and warnings."""
    with alone(_one_run):
        _forget_earlier_run()
        environment = dict(os.environ)
        os.environ.setdefault("PLUGSFT_PROGRESS_SECONDS", "5")  # somebody watches
        handlers = {number: signal.getsignal(number) for number in Stopping.SIGNALS}
        try:
            with warnings.catch_warnings():
                yield
        except BaseException as error:
            _release_frames(error)
            raise
        finally:
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    if handler is not None:  # None: not set from Python
                        signal.signal(number, handler)
            free_memory()


def _forget_earlier_run() -> None:
    """Forget accelerate's state, the failure and the peak of memory of an earlier run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    host_group.cache_clear()
    vars(watch).update(vars(Watch()))
    if _cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux only
        Path("/proc/self/clear_refs").write_text("5")


def _release_frames(error: BaseException | None) -> None:
    """Clear an error's frames, which hold the run's model; notebooks store errors."""
    while error is not None and os.environ.get("PLUGSFT_DEBUG") != "1":
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def free_memory() -> None:
    """Free the run's model now, and what torch's compiler knows of it."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if _cuda.is_initialized():
        torch.cuda.empty_cache()
