"""Train with an AdamW that takes less memory: affects results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from plugsft import Machine, Recipe, RecipeError, Train, hookimpl, not_installed, plugin

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


@plugin(provides={"bfloat16_updates": None}, affects_results=["kind"])
class LowMemoryAdam:
    """Train with an AdamW that takes less memory: affects results.

    AdamW in float32 takes 16 bytes a weight: weight, gradient and two moments.

    - `corrected`: 8 bytes a weight: all four in bfloat16, with `model.weights = "bfloat16"`. Values
      are rounded up or down at random, so on average they lose nothing. The random bits depend on
      seed, step and weight alone, so DDP and FSDP2 compute what one process does.
    - `adamw_8bit`: 10 bytes a weight: the moments in 8 bits, with one scale for each 256
      (bitsandbytes).
    - `paged_adamw_8bit`: the same, and moments that do not fit the GPU stay in the host's memory.
    """

    kind: Literal["adamw_8bit", "paged_adamw_8bit", "corrected"]
    """Which AdamW. The two of 8 bits need the extra `quantize`."""

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Refuse weights of another type, ranks that shard them, and a missing package or GPU."""
        narrow = recipe.model.weights == "bfloat16"
        if self.kind == "corrected":
            if not narrow:
                raise RecipeError(
                    'kind: "corrected" is for weights in bfloat16: set model.dtype = "bfloat16" '
                    'and model.weights = "bfloat16"'
                )
            return
        if narrow:
            raise RecipeError(
                f'kind: "{self.kind}" rounds bfloat16 weights, which loses small steps; set '
                'kind = "corrected", or remove model.weights'
            )
        if machine.strategy:
            raise RecipeError(
                "kind: bitsandbytes quantizes moments in blocks of a whole weight, and ranks shard "
                "weights otherwise; launch with DDP (recipes/accelerate/gpu8.yaml), or set kind = "
                '"corrected" under FSDP2'
            )
        if missing := not_installed("bitsandbytes", "quantize"):
            raise RecipeError(f"kind: {missing}")
        if self.kind == "paged_adamw_8bit":
            from .eight_bit import ensure_gpu

            ensure_gpu()

    @hookimpl
    def optimizer(self, model: Module, train: Train) -> Optimizer:
        """Create the optimizer."""
        from plugsft.kit import decay_groups

        groups, betas = decay_groups(model, train.weight_decay), (train.beta1, train.beta2)
        if self.kind == "corrected":
            from .corrected import CorrectedAdamW

            return CorrectedAdamW(groups, train.learning_rate, betas, train.eps, train.seed)
        from .eight_bit import CLASSES

        optimizer: Optimizer = CLASSES[self.kind](
            groups, lr=train.learning_rate, betas=betas, eps=train.eps
        )
        return optimizer

    @hookimpl
    def summary(self) -> str:
        """Report which AdamW trains."""
        return self.kind
