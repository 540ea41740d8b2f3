"""Patches Triton 3.9's interpreter so that it runs Liger's kernels: import it first.

TRITON_INTERPRET=1 must be set. It knows no floats of Python's, and no functions of CUDA's library.
"""

import importlib
import pkgutil

import liger_kernel.ops
import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

_convert = interpreter._implicit_cvt


def _convert_floats(value):
    if isinstance(value, float):
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return _convert(value)


interpreter._implicit_cvt = _convert_floats
for _found in pkgutil.iter_modules(liger_kernel.ops.__path__):
    try:
        _module = importlib.import_module(f"liger_kernel.ops.{_found.name}")
    except Exception:  # kernels for other devices
        continue
    # Looked up late: the interpreter changes tl.math while a kernel runs.
    if hasattr(_module, "rsqrt"):
        _module.rsqrt = lambda x: tl.math.rsqrt(x)
    if hasattr(_module, "tanh"):
        _module.tanh = lambda x: 1 - 2 / (tl.math.exp(2 * x) + 1)
