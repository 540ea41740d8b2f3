"""Patches Triton 3.9's interpreter so that it runs kernels of other packages: import it first.

They are those of Liger and cut_cross_entropy. TRITON_INTERPRET=1 must be set. The interpreter knows
no floats of Python's, and no functions of CUDA's library.
"""

import importlib
import importlib.util
import pkgutil

import liger_kernel.ops
import numpy as np
import torch
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

if importlib.util.find_spec("cut_cross_entropy"):

    class _Functions:
        tanh = staticmethod(lambda x: 1 - 2 / (tl.math.exp(2 * x) + 1))
        log1p = staticmethod(lambda x: tl.math.log(1 + x))

    importlib.import_module("cut_cross_entropy.tl_utils").tl_libdevice = _Functions
    torch.cuda.is_bf16_supported = lambda *_: True
