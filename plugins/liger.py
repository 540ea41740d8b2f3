"""Use Liger's fused kernels for norms, MLPs and rotary embeddings, in full fine-tuning."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from plugsft import ModelLoad, PluginError, RecipeError, hookimpl, plugin, state

SWITCHES = {
    "rms_norm": ("rms_norm",),
    "layer_norm": ("layer_norm",),
    "mlp": ("swiglu", "geglu", "relu_squared"),
    "rope": ("rope",),
}
"""Option -> Liger's names; a family has one kind of MLP."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": nn.functional.silu,
    "geglu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: nn.functional.relu(x).square(),
}
"""Activations of Liger's MLP kernels, whatever the model's own activation is."""
Parts = dict[ModuleType, dict[str, Any]]


@plugin(
    conflicts={
        "lora": "Liger's kernels are for full fine-tuning: they gain nothing with LoRA, and can "
        "take twice the time"
    }
)
class Liger:
    """Use Liger's fused kernels for norms, MLPs and rotary embeddings, in full fine-tuning.

    Only this model is patched: Liger's changes to the whole model family are undone. Liger's
    loss stays off; see fused_loss.
    """

    rms_norm: bool | None = None
    """Use this kernel. Default for each: if Liger has it for the model family."""
    layer_norm: bool | None = None
    mlp: bool | None = None
    """SwiGLU, GeGLU or squared ReLU, as the family has it."""
    rope: bool | None = None
    """Rotary position embeddings."""

    patched: dict[str, int] = state({})
    """Kernel -> number of modules that use it."""

    @hookimpl
    def check(self) -> None:
        """Refuse a machine that cannot run the kernels."""
        if importlib.util.find_spec("liger_kernel") is None:
            raise RecipeError("liger-kernel is not installed: pip install liger-kernel")
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            raise RecipeError("its kernels need a GPU, and there is none; remove [plugins.liger]")
        if not any(self.switch(name) is not False for name in SWITCHES):
            raise RecipeError("every kernel is switched off; remove [plugins.liger]")

    @hookimpl(wrapper=True)
    def optimize_model(self, load: ModelLoad) -> Generator[None, Any, Any]:
        """Patch the model's modules; refuse a family that Liger has no kernels for."""
        liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
        families: dict[str, Callable[..., None]] = liger.MODEL_TYPE_TO_APPLY_LIGER_FN
        self.kernels(families, family_of(load))
        model = yield
        kernels = self.kernels(families, model.config.model_type)
        if "mlp" in kernels:
            ensure_activation(model, kernels["mlp"])
        functions = apply(model, families[model.config.model_type], [*kernels.values()])
        self.patched = count(model, functions)
        absent = [name for name in kernels if self.switch(name) and not self.patched.get(name)]
        if absent or not self.patched:
            raise PluginError(
                f"plugins.liger: no module of this model ({type(model).__name__}) can use "
                f"{' or '.join(absent) or 'its kernels'}; "
                + (f"remove {', '.join(absent)}" if absent else "remove [plugins.liger]")
            )
        return model

    def switch(self, name: str) -> bool | None:
        """Return the option of a kernel."""
        option: bool | None = getattr(self, name)
        return option

    def kernels(self, families: dict[str, Any], family: str) -> dict[str, str]:
        """Return the kernels to use for a family: option -> Liger's name."""
        if family not in families:
            raise RecipeError(
                f"plugins.liger: Liger has no kernels for models of type '{family}'; remove it. "
                f"There are: {', '.join(sorted(families))}"
            )
        known = inspect.signature(families[family]).parameters
        available = {
            name: next(their for their in theirs if their in known)
            for name, theirs in SWITCHES.items()
            if set(theirs) & set(known)
        }
        for name in SWITCHES:
            if self.switch(name) and name not in available:
                raise RecipeError(
                    f"plugins.liger.{name}: Liger has no such kernel for models of type "
                    f"'{family}'; remove it. There are: {', '.join(available)}"
                )
        return {name: their for name, their in available.items() if self.switch(name) is not False}

    @hookimpl
    def verdict(self) -> str | None:
        """Report the number of modules per kernel."""
        if not self.patched:
            return None
        counted = ", ".join(f"{number} {name}" for name, number in sorted(self.patched.items()))
        return f"liger-kernel {importlib.metadata.version('liger-kernel')}, modules: {counted}"


def family_of(load: ModelLoad) -> str:
    """Return a model's type from its configuration."""
    wanted = ("revision", "trust_remote_code")
    kwargs = {name: load.kwargs[name] for name in wanted if name in load.kwargs}
    config = AutoConfig.from_pretrained(load.path, **kwargs)
    return str(config.model_type)


def apply(model: Any, patch: Callable[..., None], kernels: list[str]) -> Parts:
    """Let Liger patch a model, and undo its changes to other models; return its functions.

    Liger replaces the forward of each existing module, but also classes and functions in the
    Python module of the family, and so in every model built later.
    """
    known = inspect.signature(patch).parameters
    # All other kernels are off, above all the loss.
    switches = {name: name in kernels for name in known if name != "model"}
    before: Parts = {module: dict(vars(module)) for module in modeling()}
    try:
        patch(model=model, **switches)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise PluginError(
            f"plugins.liger: it cannot patch a {type(model).__name__}: {error}. Remove it"
        ) from error
    finally:
        functions = undo(before)
    for module in modeling():
        for name, value in vars(module).items():
            if str(getattr(value, "__module__", "")).startswith("liger_kernel"):
                raise PluginError(
                    f"plugins.liger: it changed {module.__name__}.{name} for all models of this "
                    "process; remove it"
                )
    bind(model, functions)
    return functions


def modeling() -> list[ModuleType]:
    """Return the Python modules that define models."""
    families = [
        module for name, module in sys.modules.items() if name.startswith("transformers.models.")
    ]
    return [*families, nn, nn.functional]


def undo(before: Parts) -> Parts:
    """Restore replaced values; return the functions that replaced them."""
    functions: Parts = {}
    for module, values in before.items():
        for name, value in values.items():
            new = vars(module).get(name)
            if new is not value:
                setattr(module, name, value)
                if inspect.isfunction(new):
                    functions.setdefault(module, {})[name] = new
    return functions


def bind(model: nn.Module, functions: Parts) -> None:
    """Give modules that call a replaced function by name a forward that uses the new one."""
    for part in model.modules():
        forward = type(part).forward
        home = sys.modules.get(getattr(forward, "__module__", ""))
        new = functions.get(home, {}) if home else {}
        code = getattr(forward, "__code__", None)
        if code is None or not set(new) & set(code.co_names):
            continue
        own = FunctionType(
            code,
            {**vars(home), **new},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        own.__kwdefaults__ = forward.__kwdefaults__
        part.forward = MethodType(own, part)


def count(model: nn.Module, functions: Parts) -> dict[str, int]:
    """Count the modules that use each kernel."""
    named = [item for names in functions.values() for item in names.items()]
    counted: Counter[str] = Counter()
    for part in model.modules():
        forward = getattr(vars(part).get("forward"), "__func__", None)
        if forward is None:
            continue
        if forward.__module__.startswith("liger_kernel"):
            norms = ("RMSNorm", "rms_norm"), ("LayerNorm", "layer_norm")
            kinds = [kind for word, kind in norms if word in forward.__qualname__]
            counted[kinds[0] if kinds else "mlp"] += 1
        elif any(forward.__globals__.get(name) is new for name, new in named):
            counted["rope"] += 1
    return dict(counted)


def ensure_activation(model: nn.Module, kernel: str) -> None:
    """Refuse MLPs whose activation is not the kernel's, which would silently replace it."""
    values = torch.linspace(-4, 4, 33)
    for part in model.modules():
        for name in ("act_fn", "activation_fn"):
            own = getattr(part, name, None)
            if callable(own) and not torch.allclose(
                own(values), ACTIVATIONS[kernel](values), atol=1e-4
            ):
                raise RecipeError(
                    f"plugins.liger: its {kernel} kernel has another activation than the "
                    f"{type(own).__name__} in this model's MLPs; set mlp = false"
                )
