"""Compute attention in one launch a layer, with flash-attn or the kernel that torch brings."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from plugsft import Batch, ModelLoad, Recipe, RecipeError, hookimpl, plugin, state

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from .kernels import Obstacle


@dataclass(frozen=True)
class Conditions:
    """What decides which kernels can run, before the model is known."""

    gpu: tuple[int, int] | None
    """Compute capability of the GPU; the lowest of several."""
    half: bool
    """Whether attention is computed in 16 bits."""
    packed: bool
    built: bool
    """Whether this torch was built with its own kernel."""
    shared: bool = False
    """Whether two answers share a prompt."""


@plugin(provides={"fast_attention": "kernel"})
class FlashAttention:
    """Compute attention in one launch a layer, with flash-attn or the kernel that torch brings.

    "auto" takes the best kernel that can run, and reports why better ones cannot. Any other kernel
    runs, or stops the run.
    """

    kernel: Literal["auto", "fa4", "fa3", "fa2", "torch", "sdpa"] = "auto"
    """fa4, fa3, fa2: the packages flash-attn-4 (Hopper, Blackwell), flash-attn-3 (Hopper) and
    flash-attn. torch: its own kernel, for packed rows, nothing to build. sdpa: any device; in
    packed rows, document by document."""

    conditions: Conditions = state(Conditions(None, False, False, False))
    result: str = state("")
    sums: int = state(0)
    """How many numbers of a token's gradient the kernel sums; 0 if it can index any number."""
    row_length: str = state("")
    """The option that limits a packed row."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse a kernel that cannot run on this machine."""
        from .kernels import conditions_of, find_obstacle

        self.conditions = conditions_of(recipe)
        packing = recipe.provides("packed_rows")
        self.row_length = packing.key if packing else ""
        if self.kernel != "auto":
            self.ensure_no(find_obstacle(self.kernel, self.conditions))

    @hookimpl(wrapper=True)
    def optimize_model(self, load: ModelLoad) -> Generator[None, Any, Any]:
        """Choose a kernel for the model's configuration; make sure that the model uses it."""
        from .kernels import PACKAGES, SINKS, attention_config, has_sinks, register_kernel
        from .limits import sums_of_token

        config = attention_config(load)
        kernel = self.choose(config)
        self.sums = sums_of_token(kernel, config)
        name = register_kernel(kernel, self.conditions.packed)
        if name:
            load.kwargs["attn_implementation"] = name
        model = yield
        used = model.config.get_text_config()._attn_implementation
        if name and used != name:
            raise RecipeError(f"plugins.flash_attention: the model uses {used} instead of {name}")
        if kernel in (*PACKAGES, "torch") and has_sinks(model):
            self.ensure_no(SINKS)
        return model

    @hookimpl(wrapper=True)
    def collate(self) -> Generator[None, Batch, Batch]:
        """Refuse a row whose gradients the kernel cannot index."""
        batch = yield
        if self.sums:
            from .limits import ensure_indexable

            ensure_indexable(batch, self.sums, self.row_length)
        return batch

    @hookimpl
    def summary(self) -> str:
        """Name the kernel, and why better ones cannot run."""
        return self.result

    def choose(self, config: PretrainedConfig) -> str:
        """Return the kernel for a model; "" leaves attention to transformers."""
        from .kernels import BEST_FIRST, describe, find_obstacle, find_obstacle_in_model

        packed = self.conditions.packed
        if self.kernel != "auto":
            self.ensure_no(find_obstacle_in_model(self.kernel, config, packed))
            self.result = describe(self.kernel, packed)
            return self.kernel
        chosen, refused = "", dict[str, list[str]]()
        for kernel in BEST_FIRST:
            obstacle = find_obstacle(kernel, self.conditions) or find_obstacle_in_model(
                kernel, config, packed
            )
            if obstacle is None:
                chosen = kernel
                break
            refused.setdefault(obstacle.reason, []).append(kernel)
        reasons = [f"not {', '.join(kernels)}: {reason}" for reason, kernels in refused.items()]
        self.result = "; ".join([describe(chosen, packed), *reasons])
        return chosen

    def ensure_no(self, obstacle: Obstacle | None) -> None:
        """Stop the run if the kernel that the recipe names cannot run."""
        if obstacle is not None:
            raise RecipeError(
                f'plugins.flash_attention: kernel = "{self.kernel}" cannot run: '
                f"{obstacle.reason}; {obstacle.cure}"
            )
