"""Patch one model with Liger's kernels, and no other model of its family."""

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from plugsft import PluginError, RecipeError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": nn.functional.silu,
    "geglu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: nn.functional.relu(x).square(),
}
"""Activations of Liger's MLP kernels, whatever the model's own activation is."""
Namespaces = dict[ModuleType, dict[str, Any]]
"""Values of Python modules, by name."""


def can_run_triton() -> bool:
    """Tell whether this machine has a GPU, or Triton's interpreter is on."""
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def patch_model(
    model: nn.Module, liger_patch: Callable[..., None], kernels: dict[str, str]
) -> dict[str, int]:
    """Use kernels (option -> Liger's name) in a model; return the number of modules of each."""
    if "mlp" in kernels:
        ensure_activation(model, kernels["mlp"])
    functions = apply_patch(model, liger_patch, [*kernels.values()])
    return count_modules(model, functions)


def ensure_used(model: nn.Module, required: list[str], patched: dict[str, int]) -> None:
    """Refuse a required kernel that no module of the model uses."""
    unused = [name for name in required if not patched.get(name)]
    if unused or not patched:
        raise PluginError(
            f"plugins.liger: no module of this model ({type(model).__name__}) can use "
            f"{' or '.join(unused) or 'its kernels'}; "
            + (f"remove {', '.join(unused)}" if unused else "remove [plugins.liger]")
        )


def apply_patch(model: Any, liger_patch: Callable[..., None], kernels: list[str]) -> Namespaces:
    """Let Liger patch a model, and undo its changes to other models; return its functions.

    Liger replaces the forward of each existing module, but also classes and functions in the
    Python module of the family, and so in every model built later.
    """
    known = inspect.signature(liger_patch).parameters
    # All other kernels are off, above all the loss.
    switches = {name: name in kernels for name in known if name != "model"}
    before: Namespaces = {module: dict(vars(module)) for module in modeling_modules()}
    try:
        liger_patch(model=model, **switches)
    # Liger checks no family: a module of another shape fails in its code by any of these.
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise PluginError(
            f"plugins.liger: Liger cannot patch a {type(model).__name__}: {error}. "
            "Remove [plugins.liger]"
        ) from error
    finally:
        functions = restore(before)
    for module in modeling_modules():
        for name, value in vars(module).items():
            if str(getattr(value, "__module__", "")).startswith("liger_kernel"):
                raise PluginError(
                    f"plugins.liger: Liger changed {module.__name__}.{name} for all models of "
                    "this process; remove [plugins.liger]"
                )
    bind_functions(model, functions)
    return functions


def modeling_modules() -> list[ModuleType]:
    """Return the Python modules that define models."""
    families = [
        module for name, module in sys.modules.items() if name.startswith("transformers.models.")
    ]
    return [*families, nn, nn.functional]


def restore(before: Namespaces) -> Namespaces:
    """Restore replaced values; return the functions that replaced them."""
    functions: Namespaces = {}
    for module, values in before.items():
        for name, value in values.items():
            new = vars(module).get(name)
            if new is not value:
                setattr(module, name, value)
                if inspect.isfunction(new):
                    functions.setdefault(module, {})[name] = new
    return functions


def bind_functions(model: nn.Module, functions: Namespaces) -> None:
    """Give modules that call a replaced function by name a forward that uses the new one."""
    for module in model.modules():
        forward = type(module).forward
        home = sys.modules.get(getattr(forward, "__module__", ""))
        new = functions.get(home, {}) if home else {}
        code = getattr(forward, "__code__", None)
        if code is None or not set(new) & set(code.co_names):
            continue
        patched = FunctionType(
            code,
            {**vars(home), **new},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        patched.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(patched, module)


def count_modules(model: nn.Module, functions: Namespaces) -> dict[str, int]:
    """Count the modules that use each kernel."""
    replaced = [item for names in functions.values() for item in names.items()]
    counts: Counter[str] = Counter()
    for module in model.modules():
        forward = getattr(vars(module).get("forward"), "__func__", None)
        if forward is None:
            continue
        if forward.__module__.startswith("liger_kernel"):
            norms = ("RMSNorm", "rms_norm"), ("LayerNorm", "layer_norm")
            kinds = [kind for word, kind in norms if word in forward.__qualname__]
            counts[kinds[0] if kinds else "mlp"] += 1
        elif any(forward.__globals__.get(name) is new for name, new in replaced):
            counts["rope"] += 1
    return dict(counts)


def ensure_activation(model: nn.Module, kernel: str) -> None:
    """Refuse MLPs whose activation is not the kernel's, which would silently replace it."""
    values = torch.linspace(-4, 4, 33)
    for module in model.modules():
        for name in ("act_fn", "activation_fn"):
            activation = getattr(module, name, None)
            if callable(activation) and not torch.allclose(
                activation(values), ACTIVATIONS[kernel](values), atol=1e-4
            ):
                raise RecipeError(
                    f"plugins.liger: its {kernel} kernel has another activation than the "
                    f"{type(activation).__name__} in this model's MLPs; set mlp = false"
                )
