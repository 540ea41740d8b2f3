"""Makes an optimizer of torch from a recipe's options."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import AdamW, Muon, Optimizer

from plugsft import RecipeError, Train
from plugsft.kit import decay_groups, decoder_layers

CLASSES = {
    name.lower(): getattr(torch.optim, name)
    for name in torch.optim.__all__
    if inspect.isclass(getattr(torch.optim, name))
}
DECOUPLED = {"adafactor", "muon"}
"""Optimizers whose weight decay is decoupled, as [train] says; others may have a switch for it."""
SWITCH = "decoupled_weight_decay"
SET_BY_RECIPE = {"params": "", "lr": "train.learning_rate", "betas": "train.beta1 and train.beta2"}
"""Argument -> where a recipe sets it."""
USELESS = {
    "capturable": "it is for CUDA graphs",
    "differentiable": "it is for gradients of a step",
    "maximize": "it would raise the loss",
}
"""Argument -> why no run needs it."""


def arguments_of(name: str) -> Mapping[str, Any]:
    """Return an optimizer's arguments and their defaults."""
    parameters = inspect.signature(CLASSES[name].__init__).parameters
    return {key: each.default for key, each in parameters.items() if key != "self"}


def ensure_options(name: str, options: Mapping[str, Any], train: Train) -> None:
    """Refuse options that the optimizer does not have, in its table or in [train]."""
    arguments = arguments_of(name)
    problems = []
    for key in options:
        if key in SET_BY_RECIPE:
            problems.append(f"options.{key}: set {SET_BY_RECIPE[key] or 'other options'} instead")
        elif key in USELESS:
            problems.append(f"options.{key}: {USELESS[key]}; remove it")
        elif key not in arguments:
            known = ", ".join(sorted({*arguments} - {*SET_BY_RECIPE, *USELESS}))
            problems.append(f"options.{key}: {name} has no such option; it has: {known}")
    if name != "muon":  # its AdamW uses them
        for key in sorted(changed(train)):
            if not isinstance(arguments.get("eps" if key == "eps" else "betas"), float | tuple):
                problems.append(f"train.{key}: {name} does not use it; remove it")
            elif key == "eps" and not isinstance(arguments["eps"], float):
                problems.append(f"train.eps: {name} has several; set options = {{eps = [...]}}")
    if train.weight_decay and "weight_decay" in options:
        problems.append("options.weight_decay: train.weight_decay is set too; remove one")
    elif train.weight_decay and name not in DECOUPLED and SWITCH not in arguments:
        kind = "has only the L2 penalty" if "weight_decay" in arguments else "has no weight decay"
        cure = ": set options = {weight_decay = ...} for it, and" if "only" in kind else ";"
        problems.append(f"train.weight_decay is decoupled, and {name} {kind}{cure} remove this")
    problems = problems or refused_values(name, options)
    if problems:
        raise RecipeError(problems)


def refused_values(name: str, options: Mapping[str, Any]) -> list[str]:
    """Return what torch says about the values of options, from two steps of a tiny weight."""
    weight = Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    try:
        optimizer = CLASSES[name]([weight], lr=1e-3, **in_tuples(options))
        for _ in range(2):
            optimizer.step()
    except Exception as error:  # torch has various kinds
        return [f"options: {name} of torch refuses them: {error}"]
    return []


def in_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with tuples in place of TOML's lists."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }


def changed(train: Train) -> set[str]:
    """Return which of AdamW's settings a recipe changes."""
    settings = ("beta1", "beta2", "eps")
    return {key for key in settings if getattr(train, key) != Train.model_fields[key].default}


def make_optimizer(name: str, options: Mapping[str, Any], model: Module, train: Train) -> Optimizer:
    """Make an optimizer of all trained weights; norms and biases have no weight decay."""
    arguments = in_tuples(options)
    known = arguments_of(name)
    decay = arguments.pop("weight_decay", train.weight_decay)
    if name == "muon":
        return MuonAndAdamW(model, train, decay, arguments)
    if {"beta1", "beta2"} & changed(train):
        arguments["betas"] = (train.beta1, train.beta2)
    if "eps" in changed(train):
        arguments["eps"] = train.eps
    if SWITCH in known and train.weight_decay:
        arguments[SWITCH] = True
    groups = decay_groups(model, decay if "weight_decay" in known else None)
    made: Optimizer = CLASSES[name](groups, lr=train.learning_rate, **arguments)
    return made


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of the layers, AdamW for the rest."""

    def __init__(
        self, model: Module, train: Train, decay: float, options: Mapping[str, Any]
    ) -> None:
        in_layers = {
            id(weight)
            for layer in decoder_layers(model, "Muon could train: use another optimizer")
            for weight in layer.parameters()
            if len(weight.shape) == 2
        }
        self.inner: list[Optimizer] = []
        matrices, others = list[dict[str, Any]](), list[dict[str, Any]]()
        for group in decay_groups(model, decay):
            for belongs, groups in ((True, matrices), (False, others)):
                chosen = [it for it in group["params"] if (id(it) in in_layers) == belongs]
                if chosen:
                    groups.append(group | {"params": chosen})
        rate = train.learning_rate
        if matrices:
            # Its updates are as large as AdamW's, so both can have the same learning rate.
            options = {"adjust_lr_fn": "match_rms_adamw", **options}
            self.inner.append(Muon(matrices, lr=rate, **options))
        if others:
            betas = train.beta1, train.beta2
            self.inner.append(AdamW(others, lr=rate, betas=betas, eps=train.eps, fused=True))
        super().__init__([group for each in self.inner for group in each.param_groups], {})
        for each in self.inner:
            each.state = self.state  # where checkpoints look

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights."""
        for optimizer in self.inner:
            optimizer.step()
