"""Compute attention in one launch a layer, with flash-attn or the kernel that torch brings."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from plugsft import ModelLoad, Recipe, RecipeError, hookimpl, plugin, state

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from .kernels import Obstacle


@dataclass(frozen=True)
class Here:
    """What decides which kernel can run, before the model is known."""

    gpu: tuple[int, int] | None
    """Compute capability; the least, where there are several."""
    half: bool
    """Whether attention is computed in 16 bits."""
    packed: bool
    built: bool
    """Whether this torch was built with its kernel."""
    shared: bool = False
    """Whether two answers share a prompt."""


@plugin()
class FlashAttention:
    """Compute attention in one launch a layer, with flash-attn or the kernel that torch brings.

    "auto" takes the best that can run, and says why none before it. Any other runs, or stops the
    run.
    """

    kernel: Literal["auto", "fa3", "fa2", "torch", "sdpa"] = "auto"
    """fa3, fa2: the packages flash-attn-3 (for Hopper) and flash-attn. torch: its own kernel, for
    packed rows, nothing to build. sdpa: any device; in packed rows, document by document."""

    here: Here = state(Here(None, False, False, False))
    said: str = state("")

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Look at the machine, and refuse a kernel that cannot run on it."""
        import torch

        from .kernels import least_gpu, unavailable

        mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() != "no"
        half = mixed or recipe.model.dtype != "float32"
        gpu = None if recipe.device == "cpu" else least_gpu()
        built = torch.backends.cuda.is_flash_attention_available()
        shared = recipe.plugins.get("dpo", {}).get("share_prompt", False)
        self.here = Here(gpu, half, recipe.has("bfd_packing"), built, shared)
        if self.kernel != "auto":
            self.insist(unavailable(self.kernel, self.here))

    @hookimpl(wrapper=True)
    def optimize_model(self, load: ModelLoad) -> Generator[None, Any, Any]:
        """Choose by the model's configuration, and make sure that the model took the choice."""
        from transformers import AutoConfig

        from .kernels import SINKS, has_sinks, register

        given = {"revision", "trust_remote_code"} & {*load.kwargs}
        config = AutoConfig.from_pretrained(
            load.path, **{name: load.kwargs[name] for name in given}
        )
        kernel = self.choose(config.get_text_config())
        wanted = register(kernel, self.here.packed)
        if wanted:
            load.kwargs["attn_implementation"] = wanted
        model = yield
        took = model.config.get_text_config()._attn_implementation
        if wanted and took != wanted:
            raise RecipeError(f"plugins.flash_attention: asked for {wanted}, the model took {took}")
        if kernel in ("fa3", "fa2", "torch") and has_sinks(model):
            self.insist(SINKS)
        return model

    @hookimpl
    def verdict(self) -> str | None:
        """Name the kernel, and why it is not a better one."""
        return self.said or None

    def choose(self, config: PretrainedConfig) -> str:
        """Return the kernel for a model; none leaves its attention to transformers."""
        from .kernels import BEST_FIRST, title, unavailable, unfit

        if self.kernel != "auto":
            self.insist(unfit(self.kernel, config, self.here.packed))
            self.said = title(self.kernel, self.here.packed)
            return self.kernel
        chosen, reasons = "", dict[str, list[str]]()
        for kernel in BEST_FIRST:
            why = unavailable(kernel, self.here) or unfit(kernel, config, self.here.packed)
            if why is None:
                chosen = kernel
                break
            reasons.setdefault(why[0], []).append(kernel)
        said = [f"not {', '.join(kernels)}: {reason}" for reason, kernels in reasons.items()]
        self.said = "; ".join([title(chosen, self.here.packed), *said])
        return chosen

    def insist(self, why: Obstacle | None) -> None:
        """Stop the run if the kernel that was asked for cannot be had."""
        if why is not None:
            where = f'plugins.flash_attention: kernel = "{self.kernel}"'
            raise RecipeError(f"{where} cannot run: {why[0]}; {why[1]}")
