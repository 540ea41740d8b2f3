"""Run in this process and leave it as it was.

Restored: settings, random numbers, signals, singletons.
What stays: imported modules, what CUDA and torch's compiler have loaded, and memory that torch
reuses.
"""

import gc
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import other as accelerate_other
from transformers.utils import logging as transformers_logging

from ..ranks.agree import host_group
from ..ranks.failures import Failure, failure
from ..ranks.stopping import Stopping
from .messages import alone

_one_run = threading.Lock()
_cuda: Any = torch.cuda  # partly untyped
_backend: Any = torch.backends.cuda


@contextmanager
def isolated() -> Iterator[None]:
    """Train or generate in a block; undo all that it changes in the process."""
    with alone(_one_run):
        try:
            with ExitStack() as stack:
                stack.enter_context(_fresh_singletons())
                stack.enter_context(warnings.catch_warnings())
                for keep in (_environment, _signals, _random_numbers, _torch_settings, _libraries):
                    stack.callback(keep())
                _forget_peak_memory()
                yield
        except BaseException as error:
            _release_frames(error)
            raise
        finally:
            free_memory()


def _environment() -> Callable[[], None]:
    before = dict(os.environ)
    os.environ.setdefault("PLUGSFT_PROGRESS_SECONDS", "5")  # somebody watches

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

    return restore


def _signals() -> Callable[[], None]:
    """Restore the handlers; after a signal, those of the run stay in place."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    handlers = {number: signal.getsignal(number) for number in Stopping.SIGNALS}

    def restore() -> None:
        for number, handler in handlers.items():
            if handler is not None:  # None: not set from Python
                signal.signal(number, handler)

    return restore


def _random_numbers() -> Callable[[], None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if _cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)

    return restore


def _torch_settings() -> Callable[[], None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    precision, cudnn = torch.get_float32_matmul_precision(), _backend.cudnn_sdp_enabled()

    def restore() -> None:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)

    return restore


def _libraries() -> Callable[[], None]:
    """Restore what transformers prints, and what accelerate knows of DeepSpeed."""
    library: Any = transformers_logging
    bars, verbosity = library.is_progress_bar_enabled(), library.get_verbosity()
    has_deepspeed = accelerate_other.is_deepspeed_available

    def restore() -> None:
        (library.enable_progress_bar if bars else library.disable_progress_bar)()
        library.set_verbosity(verbosity)
        accelerate_other.is_deepspeed_available = has_deepspeed

    return restore


@contextmanager
def _fresh_singletons() -> Iterator[None]:
    """Give the block accelerate's state of a new process, then restore it."""
    states = [vars(PartialState), vars(AcceleratorState), vars(GradientState)]
    shared = [state["_shared_state"] for state in states]
    before = [dict(state) for state in shared]

    def put(contents: list[dict[str, Any]]) -> None:
        for state, content in zip(shared, contents, strict=True):
            state.clear()
            state.update(content)
        host_group.cache_clear()
        vars(failure).update(vars(Failure()))

    put([{}, {}, {}])
    try:
        yield
    finally:
        put(before)


def _forget_peak_memory() -> None:
    """Begin a new peak of memory, which the run reports."""
    if _cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux only
        Path("/proc/self/clear_refs").write_text("5")


def _release_frames(error: BaseException | None) -> None:
    """Clear an error's frames, which hold the run's model; notebooks store errors."""
    if os.environ.get("PLUGSFT_DEBUG") == "1":
        return
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def free_memory() -> None:
    """Free the run's model now, and what torch's compiler knows of it."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if _cuda.is_initialized():
        torch.cuda.empty_cache()
