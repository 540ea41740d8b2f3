"""The kernels that Liger has for each model family."""

import inspect
from collections.abc import Callable, Mapping

from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

from plugsft import RecipeError

LIGER_NAMES = {
    "rms_norm": ("rms_norm",),
    "layer_norm": ("layer_norm",),
    "mlp": ("swiglu", "geglu", "relu_squared"),
    "rope": ("rope",),
}
"""Option -> Liger's names; a family has one kind of MLP."""


def liger_patch(family: str) -> Callable[..., None]:
    """Return Liger's function that patches models of a family."""
    patch: Callable[..., None] = MODEL_TYPE_TO_APPLY_LIGER_FN[family]
    return patch


def choose_kernels(switches: Mapping[str, bool | None], family: str) -> dict[str, str]:
    """Return the kernels to use for a family: option -> Liger's name."""
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise RecipeError(
            f"plugins.liger: Liger has no kernels for models of type '{family}'; remove it. "
            f"Liger has kernels for: {', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
        )
    known = inspect.signature(liger_patch(family)).parameters
    available = {
        option: name for option, names in LIGER_NAMES.items() for name in names if name in known
    }
    for option, switch in switches.items():
        if switch and option not in available:
            raise RecipeError(
                f"plugins.liger.{option}: Liger has no such kernel for models of type "
                f"'{family}'; remove it. Liger has: {', '.join(available)}"
            )
    return {option: name for option, name in available.items() if switches[option] is not False}
