"""Use Liger's fused kernels for norms, MLPs and rotary embeddings, in full fine-tuning."""

import importlib.metadata
from collections.abc import Generator
from typing import Any

from plugsft import Recipe, RecipeError, hookimpl, plugin, state


@plugin(
    conflicts={
        "lora": "Liger's kernels are for full fine-tuning; with adapters [plugins.compile] is "
        "faster (on an H100 79,931 tokens/s, TRL with Liger 60,542)"
    },
    needs={"liger_kernel": "liger"},
    provides={"fused_kernels": None},
)
class Liger:
    """Use Liger's fused kernels for norms, MLPs and rotary embeddings, in full fine-tuning.

    Only this model is patched: Liger's changes to the whole model family are undone. Liger's
    loss stays off; see fused_loss.
    """

    rms_norm: bool | None = None
    """Fuse RMS norms. Default: if Liger can for this family."""
    layer_norm: bool | None = None
    """Fuse layer norms. Default: if Liger can for this family."""
    mlp: bool | None = None
    """Fuse SwiGLU, GeGLU or squared ReLU, as the family has it. Default: if Liger can."""
    rope: bool | None = None
    """Fuse rotary position embeddings. Default: if Liger can for this family."""

    patched: dict[str, int] = state({})
    """Kernel -> number of modules that use it."""

    def switches(self) -> dict[str, bool | None]:
        """Return the options: true, false, or None for the default."""
        return {name: getattr(self, name) for name in ("rms_norm", "layer_norm", "mlp", "rope")}

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse a machine that cannot run the kernels, and a family that has none."""
        from plugsft.kit import meta_model

        from .patch import can_run_triton

        if not can_run_triton():
            raise RecipeError("its kernels need a GPU, and there is none; remove [plugins.liger]")
        if all(switch is False for switch in self.switches().values()):
            raise RecipeError("every kernel is switched off; remove [plugins.liger]")
        from .kernels import choose_kernels

        if (model := meta_model(recipe)) is not None:
            choose_kernels(self.switches(), model.config.model_type)

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Any, Any]:
        """Patch the model's modules."""
        from .kernels import choose_kernels, liger_patch
        from .patch import ensure_used, patch_model

        model = yield
        family, switches = model.config.model_type, self.switches()
        kernels = choose_kernels(switches, family)
        self.patched = patch_model(model, liger_patch(family), kernels)
        ensure_used(model, [name for name in kernels if switches[name]], self.patched)
        return model

    @hookimpl
    def summary(self) -> str | None:
        """Report the number of modules per kernel."""
        if not self.patched:
            return None
        counts = ", ".join(f"{number} {name}" for name, number in sorted(self.patched.items()))
        return f"liger-kernel {importlib.metadata.version('liger-kernel')}, modules: {counts}"
