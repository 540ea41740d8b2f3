"""Store the frozen weights in 4 or 8 bits, under adapters (QLoRA): affects results."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import field
from typing import Any, Literal

from plugsft import (
    Capability,
    Machine,
    ModelLoad,
    Recipe,
    RecipeError,
    hookimpl,
    not_installed,
    plugin,
    state,
)


@plugin(after=["lora"], provides={"quantized_base": None}, affects_results=["kind", "skip"])
class Quantize:
    """Store the frozen weights in 4 or 8 bits, under adapters (QLoRA): affects results.

    - `nf4`: NF4 with double quantization (bitsandbytes): 0.52 bytes a weight.
    - `int8`: 8 bits, with a scale for each output: 1 byte a weight, and a tenth of the error.

    A product restores its weight in `model.dtype` first, so a run computes exactly what adapters
    on the restored weights compute. Embeddings, head and norms stay as they are.
    """

    kind: Literal["nf4", "int8"]
    """How the weights of linear layers are stored. "nf4" needs the extra `quantize`."""
    skip: list[str] = field(default_factory=list)
    """Linear layers that are not quantized, by the ends of their names."""

    dtype: str = state("float32")
    """The dtype that weights are restored in."""
    left_out: list[str] = state([])
    """Names of modules that are not quantized."""
    result: str = state("")

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Refuse a model without adapters or sharded, and names that are not in the model."""
        if not recipe.provides("adapters"):
            table = Capability.bundled("adapters").table
            raise RecipeError(f"quantized weights cannot be trained; add {table}")
        if machine.strategy:
            raise RecipeError(
                "FSDP2 and ZeRO-3 cannot shard quantized weights. Each GPU holds the whole base in "
                "few bits under DDP: launch with recipes/accelerate/gpu8.yaml; or remove "
                "[plugins.quantize]"
            )
        missing = not_installed("bitsandbytes", "quantize")
        if self.kind == "nf4" and missing:
            raise RecipeError(f"kind: {missing}")
        from .choose import modules_to_leave_out

        self.dtype = recipe.model.dtype
        self.left_out = modules_to_leave_out(recipe, self.skip)

    @hookimpl(wrapper=True)
    def optimize_model(self, load: ModelLoad) -> Generator[None, Any, Any]:
        """Quantize the weights as they are loaded, before adapters are added."""
        from .base import describe, record_when_saved, request

        request(load, self.kind, self.dtype, self.left_out)
        model = yield
        if self.kind == "nf4":
            from .forecast import prepare_nf4 as prepare
        else:
            from .base import prepare_int8 as prepare
        layers = prepare(model, self.dtype)
        record_when_saved(model)
        self.result = describe(model, layers, self.kind, self.dtype)
        return model

    @hookimpl
    def summary(self) -> str:
        """Report the quantized layers and the size of the base."""
        return self.result
