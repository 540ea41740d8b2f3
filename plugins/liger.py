"""Run norms, MLPs and rotary embeddings in Liger's fused kernels, in full fine-tuning."""

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
"""Ours, and what Liger calls them: a family has one kind of MLP."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": nn.functional.silu,
    "geglu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: nn.functional.relu(x).square(),
}
"""What its MLPs compute, whatever the model's own have between their weights."""
Parts = dict[ModuleType, dict[str, Any]]


@plugin(
    conflicts={
        "lora": "Liger's kernels are for full fine-tuning: they gain nothing with LoRA, and can "
        "take twice the time"
    }
)
class Liger:
    """Run norms, MLPs and rotary embeddings in Liger's fused kernels, in full fine-tuning.

    In this model alone: what Liger changes for its whole family is changed back. The loss is not
    its business here; see fused_loss.
    """

    rms_norm: bool | None = None
    """Each kernel; default: where the model family has it."""
    layer_norm: bool | None = None
    mlp: bool | None = None
    """SwiGLU, GeGLU or squared ReLU, as the family has it."""
    rope: bool | None = None
    """Rotary position embeddings."""

    patched: dict[str, int] = state({})
    """Kernel -> how many modules run in it."""

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
        """Refuse a family that Liger has no kernels for, and put them into the others' modules."""
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
                f"plugins.liger: {' and '.join(absent) or 'no kernel'} found a place in this model "
                f"({type(model).__name__}); "
                + (f"remove {', '.join(absent)}" if absent else "remove [plugins.liger]")
            )
        return model

    def switch(self, name: str) -> bool | None:
        """Return what was said of a kernel."""
        said: bool | None = getattr(self, name)
        return said

    def kernels(self, families: dict[str, Any], family: str) -> dict[str, str]:
        """Return the kernels that are wanted of a family: ours -> Liger's name."""
        if family not in families:
            raise RecipeError(
                f"plugins.liger: Liger has no kernels for models of type '{family}'; remove it. "
                f"There are: {', '.join(sorted(families))}"
            )
        known = inspect.signature(families[family]).parameters
        had = {
            name: next(their for their in theirs if their in known)
            for name, theirs in SWITCHES.items()
            if set(theirs) & set(known)
        }
        for name in SWITCHES:
            if self.switch(name) and name not in had:
                raise RecipeError(
                    f"plugins.liger.{name}: Liger has no such kernel for models of type "
                    f"'{family}'; remove it. There are: {', '.join(had)}"
                )
        return {name: their for name, their in had.items() if self.switch(name) is not False}

    @hookimpl
    def verdict(self) -> str | None:
        """Say how many modules run in which kernel."""
        if not self.patched:
            return None
        counted = ", ".join(f"{number} {name}" for name, number in sorted(self.patched.items()))
        return f"liger-kernel {importlib.metadata.version('liger-kernel')}, modules: {counted}"


def family_of(load: ModelLoad) -> str:
    """Return a model's type, from its configuration alone."""
    wanted = ("revision", "trust_remote_code")
    kwargs = {name: load.kwargs[name] for name in wanted if name in load.kwargs}
    config = AutoConfig.from_pretrained(load.path, **kwargs)
    return str(config.model_type)


def apply(model: Any, patch: Callable[..., None], kernels: list[str]) -> Parts:
    """Let Liger patch a model, and undo what it does to all others; return its functions.

    Modules that are there get its forwards, each for itself. But it also replaces classes and
    functions in the file of the family, and so in every model that is made later.
    """
    known = inspect.signature(patch).parameters
    # All that is not asked for is off, its loss above all.
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
    """Return the modules in which models are written."""
    written = [
        module for name, module in sys.modules.items() if name.startswith("transformers.models.")
    ]
    return [*written, nn, nn.functional]


def undo(before: Parts) -> Parts:
    """Put back what was replaced; return the functions that it was replaced with."""
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
    """Give modules that call such a function by its name a forward that finds the new one."""
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
    """Return how many modules run in which kernel."""
    named = [one for names in functions.values() for one in names.items()]
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
    """Refuse MLPs with another function than the kernel's, which would be dropped unheard."""
    values = torch.linspace(-4, 4, 33)
    for part in model.modules():
        for name in ("act_fn", "activation_fn"):
            own = getattr(part, name, None)
            if callable(own) and not torch.allclose(
                own(values), ACTIVATIONS[kernel](values), atol=1e-4
            ):
                raise RecipeError(
                    f"plugins.liger: its {kernel} kernel has another function than the "
                    f"{type(own).__name__} in this model's MLPs; set mlp = false"
                )
