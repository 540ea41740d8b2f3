"""Train small adapters on the frozen weights (LoRA): affects results."""

from collections.abc import Generator
from dataclasses import field
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import Field

from plugsft import ModelLoad, Recipe, RecipeError, hookimpl, plugin, state


@plugin(
    learns=["r", "alpha", "dropout", "targets", "modules_to_save", "rslora", "dora", "init"],
)
class Lora:
    """Train small adapters on the frozen weights (LoRA): affects results.

    Adapters are stored and trained in float32, whatever the type of the weights, and computed in
    the type of their inputs. The run's `model/` holds only them, in peft's format;
    `plugsft export --merge` makes a whole model of it.
    """

    r: Annotated[int, Field(ge=1)] = 16
    """Rank: the inner width of an adapter."""
    alpha: Annotated[int, Field(ge=1)] = 32
    """An adapter's output is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is left out in training."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Modules that get adapters, by the ends of their names; or all linear layers but the head."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole, and saved with the adapters."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead, which keeps its size where r is large."""
    dora: bool = False
    """Train the length of each row of weights apart from its direction: dearer by half and more."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """How adapters begin. Each leaves the model, at first, what it was."""

    seed: int = state(0)
    dtype: str = state("float32")
    fused: bool = state(False)
    said: str = state("")

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse wrong settings, and names that are not in the model."""
        self.seed, self.fused = recipe.train.seed, recipe.has("fused_loss")
        self.dtype = recipe.model.dtype
        if recipe.model.weights != "float32":
            raise RecipeError("adapters are always trained in float32; remove model.weights")
        if self.init == "orthogonal" and self.r % 2:
            raise RecipeError(f'init = "orthogonal" needs an even r; it is {self.r}')
        if find_spec("peft") is None:
            raise RecipeError("needs the package 'peft': pip install peft")
        from .adapters import choose, without_weights

        if (model := without_weights(recipe)) is not None:
            choose(self, model)

    @hookimpl(wrapper=True)
    def optimize_model(self, load: ModelLoad) -> Generator[None, Any, Any]:
        """Freeze the model, and add adapters to its layers."""
        import torch

        from .adapters import adapt

        if self.dora or self.modules_to_save:
            load.empty = False  # these begin from the weights
        load.kwargs["dtype"] = getattr(torch, self.dtype)  # frozen weights are only computed with
        model = yield
        return adapt(self, load, model)

    @hookimpl
    def verdict(self) -> str | None:
        """Say how many modules got adapters, and what share of the model is trained."""
        return self.said or None
