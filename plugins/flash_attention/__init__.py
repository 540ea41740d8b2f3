"""Compute attention in one launch a layer, with flash-attn or the kernel that torch brings."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

from plugsft import Batch, ModelLoad, Recipe, RecipeError, hookimpl, plugin, state

if TYPE_CHECKING:
    from .kernels import Obstacle


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

    conditions: Any = state()
    """What decides which kernels can run: kernels.Conditions."""
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
        self.row_length, _ = recipe.micro_batch_size()
        if self.kernel != "auto":
            self.ensure_no(find_obstacle(self.kernel, self.conditions))

    @hookimpl(wrapper=True)
    def optimize_model(self, load: ModelLoad) -> Generator[None, Any, Any]:
        """Choose a kernel for the model's configuration; make sure that the model uses it."""
        from .kernels import (
            attention_config,
            choose,
            find_unused,
            register_kernel,
            sums_of_token,
        )

        config = attention_config(load)
        kernel, obstacle, self.result = choose(self.kernel, config, self.conditions)
        self.ensure_no(obstacle)
        self.sums = sums_of_token(kernel, config)
        name = register_kernel(kernel, self.conditions.packed)
        if name:
            load.kwargs["attn_implementation"] = name
        model = yield
        self.ensure_no(find_unused(kernel, name, model))
        return model

    @hookimpl(wrapper=True)
    def collate(self) -> Generator[None, Batch, Batch]:
        """Refuse a row whose gradients the kernel cannot index."""
        batch = yield
        if self.sums:
            from .kernels import ensure_indexable

            ensure_indexable(batch, self.sums, self.row_length)
        return batch

    @hookimpl
    def summary(self) -> str:
        """Name the kernel, and why better ones cannot run."""
        return self.result

    def ensure_no(self, obstacle: Obstacle | None) -> None:
        """Stop the run if the kernel that the recipe names cannot run."""
        if obstacle is not None:
            raise RecipeError(
                f'plugins.flash_attention: kernel = "{self.kernel}" cannot run: '
                f"{obstacle.reason}; {obstacle.cure}"
            )
