"""Train small adapters on the frozen weights (LoRA): affects results."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from plugsft import Capability, Machine, ModelLoad, Place, Recipe, hookimpl, plugin, state

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


@plugin(
    provides={"adapters": "r"},
    affects_results=[
        "r",
        "alpha",
        "dropout",
        "targets",
        "experts",
        "modules_to_save",
        "rslora",
        "dora",
        "init",
        "lr_ratio",
        "adapter",
        "train_new_tokens",
    ],
)
class Lora:
    """Train small adapters on the frozen weights (LoRA): affects results.

    Adapters are stored and trained in float32, whatever the dtype of the weights, and computed in
    the dtype of their inputs. The run's `model/` holds only adapters, in peft's format;
    `plugsft export --merge` makes a whole model of it.
    """

    r: Annotated[int, Field(ge=1)] = 16
    """Rank: the inner width of an adapter."""
    alpha: Annotated[int, Field(ge=1)] = 32
    """An adapter's output is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of an adapter's inputs."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Modules that get adapters, by the ends of their names; or all linear layers but the head."""
    experts: bool = False
    """Adapt the fused weights of experts too: each expert gets an A and a B of rank r."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole, and saved with the adapters."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead, which suits large ranks."""
    dora: bool = False
    """Train the length of each weight row apart from its direction; costs half as much again."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """Initialization of adapters. With each of them, the first step's loss is the base model's."""

    lr_ratio: PositiveFloat = 1.0
    """Learning rate of an adapter's second half (B), as a multiple of the first's (LoRA+)."""
    adapter: Place | None = None
    """Adapters to go on from: a folder in peft's format, or a hub name. r, alpha, targets,
    modules_to_save, rslora and dora are theirs."""
    train_new_tokens: bool = False
    """Train the rows of `model.add_tokens` in the embeddings and the head, and no others."""

    seed: int = state(0)
    dtype: str = state("float32")
    """The dtype that frozen weights are computed in."""
    fused_head: Capability | None = state()
    """The plugin that reads the head's frozen weight."""
    has_reference: bool = state(False)
    """Whether a plugin computes with the model before training, by turning adapters off."""
    strategy: str = state("")
    """How ranks shard the model."""
    model: Any = state()

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Refuse wrong settings, and names that are not in the model."""
        self.seed, self.fused_head = recipe.train.seed, recipe.provides("fused_head")
        self.dtype, self.strategy = recipe.model.dtype, machine.strategy
        reference = recipe.provides("reference_model")
        self.has_reference = reference is not None and not reference.value
        from .options import ensure_options_work

        ensure_options_work(self, recipe)
        from plugsft.kit import ensure_same_base, meta_model

        from .adapters import adapt
        from .continued import settings_of
        from .targets import choose_modules, choose_weights

        settings, trained = settings_of(self)
        base = str(recipe.model.path)
        if trained and Path(base).is_dir():  # those of the hub are compared as they are loaded
            ensure_same_base(Path(trained.place), base, None)
        if (model := meta_model(recipe)) is not None:
            targets, _ = choose_modules(settings, model)
            choose_weights(settings, model, targets)
            if trained and not recipe.provides("reward_model"):  # it gets another head first
                trained.ensure_fits(adapt(model, trained.config_for(settings, model)))

    @hookimpl(wrapper=True)
    def optimize_model(self, load: ModelLoad) -> Generator[None, Any, Any]:
        """Freeze the model, and add adapters to its layers."""
        from .adapters import add_adapters, store_frozen_weights_in
        from .continued import settings_of

        settings, trained = settings_of(self)
        if self.train_new_tokens or settings.dora or settings.modules_to_save:
            load.empty = False  # they start from the base's weights
        store_frozen_weights_in(load, self.dtype)
        self.model = add_adapters(settings, load, (yield), trained)
        return self.model

    @hookimpl(wrapper=True)
    def optimizer(self, model: Module) -> Generator[None, Optimizer, Optimizer]:
        """Multiply the learning rate of the second halves of adapters."""
        optimizer = yield
        if self.lr_ratio != 1:
            from .rates import scale_second_halves

            scale_second_halves(optimizer, model, self.lr_ratio)
        return optimizer

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        """Store the scales of adapters, and the copies that belong to the reference."""
        return dict(self.model.fixed_state())

    @hookimpl
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the copies that belong to the reference."""
        self.model.load_fixed_state(state)

    @hookimpl
    def summary(self) -> str | None:
        """Report the number of modules with adapters, and the share of trained parameters."""
        return self.model.summary if self.model else None
