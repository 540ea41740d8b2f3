"""Train with another optimizer of torch, in place of AdamW: affects results."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Literal

from pydantic import JsonValue

from plugsft import Recipe, Train, hookimpl, plugin

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


@plugin(affects_results=["name", "options"])
class TorchOptimizer:
    """Train with another optimizer of torch, in place of AdamW: affects results.

    Learning rate, schedule and weight decay are those of [train]. Muon updates the matrices of the
    layers; AdamW updates the rest: embeddings, head, norms and biases. Unless `options` say
    otherwise, Muon has torch's `adjust_lr_fn = "match_rms_adamw"`, by which one learning rate suits
    both: updates of a 576 x 576 matrix are 4.8 times those of torch's default, "original".
    """

    name: Literal[
        "adadelta",
        "adafactor",
        "adagrad",
        "adam",
        "adamax",
        "asgd",
        "muon",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
    ]
    """The optimizer, as in torch.optim."""
    options: dict[str, JsonValue] = field(default_factory=dict)
    """Its options in torch.optim: `{momentum = 0.9}` for sgd."""

    @hookimpl
    def check(self, recipe: Recipe) -> None:
        """Refuse options that the optimizer does not have, in this table or in [train]."""
        from .make import ensure_options

        ensure_options(self.name, self.options, recipe.train)

    @hookimpl
    def optimizer(self, model: Module, train: Train) -> Optimizer:
        """Create the optimizer."""
        from .make import make_optimizer

        return make_optimizer(self.name, self.options, model, train)

    @hookimpl
    def summary(self) -> str:
        """Report the optimizer and its options."""
        options = [f"{name} {value}" for name, value in self.options.items()]
        rest = "; AdamW for embeddings, head, norms and biases" if self.name == "muon" else ""
        return ", ".join([self.name, *options]) + rest
